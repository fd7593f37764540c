// What answers the agents' calls: each model, its servers, their load, and whether calls are held.
import type { ModelDescription, Sampling } from "../api";
import { ago, count, oneLine, plural } from "../format";
import { Empty, Facts, Failed, Head, Status, Tag, Waiting } from "../parts";
import { useGet } from "../request";
import { href } from "../route";
import { useEvery } from "./workers";

const INTERVAL = 2000; // milliseconds: the load of a server is no event of the store

export function Backends() {
  const loaded = useGet<ModelDescription[]>("models");
  useEvery(INTERVAL, loaded.reload);
  return (
    <section class="view">
      <Head title="Backends" note={loaded.data && plural(loaded.data.length, "model")} />
      {loaded.error?.status === 404 ? (
        <Empty>
          <p>
            This server answers no LLM calls: it has no gateway. <code>agl server</code> and <code>agl train</code> have
            one.
          </p>
        </Empty>
      ) : loaded.error?.status === 403 ? (
        <Failed message="Only the admin key may see the backends." />
      ) : (
        <Waiting loaded={loaded}>
          {(models) =>
            models.length === 0 ? (
              <Empty>No model is registered at the gateway.</Empty>
            ) : (
              models.map((model) => <OneModel model={model} key={model.name} />)
            )
          }
        </Waiting>
      )}
    </section>
  );
}

function OneModel({ model }: { model: ModelDescription }) {
  return (
    <section class="model" aria-label={`ModelDescription ${model.name}`}>
      <h2>
        {model.name}
        {model.held && <Tag>calls are held</Tag>}
        {!model.trainable && <Tag>frozen</Tag>}
        <a class="button" href={href(["chat"], { model: model.name })}>
          Chat
        </a>
      </h2>
      <Facts
        facts={[
          ["Policy version", model.policy_version === null ? null : count(model.policy_version)],
          ["Calls running", count(model.running)],
          ["Calls held back", count(model.waiting)],
          ["Also called", model.aliases.join(", ")],
          ["Registered by", model.owner],
          ["Sampling in training", model.train && sampling(model.train)],
          ["In validation", model.val && sampling(model.val)],
        ]}
      />
      {model.replicas.length === 0 ? (
        <p class="note">It runs in the server's own process.</p>
      ) : (
        <table class="plain">
          <caption>Servers</caption>
          <thead>
            <tr>
              <th>Server</th>
              <th>State</th>
              <th>Kind</th>
              <th class="end">Running</th>
              <th>Last failure</th>
            </tr>
          </thead>
          <tbody>
            {model.replicas.map((one) => (
              <tr key={one.base_url}>
                <th scope="row">{one.base_url}</th>
                <td>
                  <Status value={one.healthy ? "healthy" : "ejected"} />
                </td>
                <td>{one.kind}</td>
                <td class="end">{count(one.running)}</td>
                <td>
                  {one.ejected_since !== null && <span class="muted">since {ago(one.ejected_since)} </span>}
                  {one.why && oneLine(one.why, 120)}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </section>
  );
}

function sampling(given: Sampling): string {
  const set = Object.entries(given).filter(
    ([, value]) => value !== null && value !== 0 && !(Array.isArray(value) && value.length === 0),
  );
  return set.map(([name, value]) => `${name} ${oneLine(value, 20)}`).join(", ");
}
