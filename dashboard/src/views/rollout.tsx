// One rollout: its head, what can be done to it, and the ways of looking at it.
import type { RolloutView } from "../api";
import { count, duration, number, oneLine, plural, time, visible } from "../format";
import { useKeys } from "../keys";
import { Code, Empty, Facts, Head, Status, Tabs, Tag, Waiting } from "../parts";
import { query, useGet } from "../request";
import { go, href, place } from "../route";
import { Actions, type Annotation } from "./actions";
import { Attempts, Logs, Raw } from "./attempts";
import { ConversationTab } from "./conversation";
import { Credit } from "./credit";
import { Forks } from "./forks";
import { Timeline } from "./timeline";
import { Tokens } from "./tokens";

const TABS = ["Conversation", "Timeline", "Tokens", "Credit", "Forks", "Attempts", "Logs", "Raw"];

export function Rollout({ rolloutId }: { rolloutId: string }) {
  const tab = place.value.path[2] ?? "conversation";
  const attempt = place.value.query.get("attempt") ?? undefined;
  const base = ["rollouts", rolloutId];
  const path = `dashboard/rollouts/${encodeURIComponent(rolloutId)}${query({ attempt })}`;
  const loaded = useGet<RolloutView>(
    path,
    (happened) => happened.kind === "reset" || happened.rollout_id === rolloutId,
  );
  useKeys({
    ...Object.fromEntries(
      TABS.map((name, index) => [String(index + 1), () => go(href([...base, name.toLowerCase()], { attempt }))]),
    ),
    u: () => go(href(["rollouts"])),
  });
  return (
    <section class="view rollout">
      <Waiting loaded={loaded}>
        {(view) => (
          <>
            <Summary view={view} reload={loaded.reload} />
            <Tabs
              label="Ways of looking at it"
              tabs={TABS.map((name) => [name, href([...base, name.toLowerCase()], { attempt })])}
              now={tab}
            />
            <div class="tab">{tabOf(tab, view)}</div>
          </>
        )}
      </Waiting>
    </section>
  );
}

function tabOf(tab: string, view: RolloutView) {
  const id = view.row.rollout.rollout_id;
  switch (tab) {
    case "conversation":
      return <ConversationTab view={view} />;
    case "timeline":
      return <Timeline view={view} />;
    case "tokens":
      return <Tokens rolloutId={id} />;
    case "credit":
      return <Credit rolloutId={id} />;
    case "forks":
      return <Forks view={view} />;
    case "attempts":
      return <Attempts view={view} />;
    case "logs":
      return <Logs view={view} />;
    case "raw":
      return <Raw view={view} />;
    default:
      return <Empty>There is no tab “{tab}”.</Empty>;
  }
}

function Summary({ view, reload }: { view: RolloutView; reload: () => void }) {
  const { rollout, reward, error, calls, tokens_read, tokens_written, agents } = view.row;
  const annotation: Annotation = rollout.metadata.annotation ?? {};
  return (
    <>
      <p class="crumbs">
        <a href={href(["rollouts"])}>Rollouts</a>
        {rollout.run_id && (
          <>
            {" / "}
            <a href={href(["runs", rollout.run_id])}>{rollout.run_id}</a>
          </>
        )}
        {rollout.group_id && (
          <>
            {" / "}
            <a href={href(["groups", rollout.group_id])}>group, member {rollout.group_index}</a>
          </>
        )}
      </p>
      {rollout.source && (
        <p class="crumbs">
          fork of <a href={href(["rollouts", rollout.source.rollout_id])}>{rollout.source.rollout_id}</a> at call{" "}
          {rollout.source.at}
        </p>
      )}
      <Head title={rollout.rollout_id}>
        <Status value={rollout.status} />
        <Actions rollout={rollout} reload={reload} />
      </Head>
      <p class="input" title="input">
        {oneLine(rollout.input, 400)}
      </p>
      {error && (
        <p class="problem" role="alert">
          {visible(error)}
        </p>
      )}
      {view.traceback && (
        <details class="block">
          <summary>Traceback</summary>
          <Code text={view.traceback} label="traceback" />
        </details>
      )}
      <Facts
        facts={[
          ["Reward", <strong key="reward">{number(reward)}</strong>],
          ["Mode", rollout.mode],
          ["Calls", count(calls)],
          ["Tokens read", count(tokens_read)],
          ["Tokens written", count(tokens_written)],
          ["Took", rollout.end_time === null ? "not ended" : duration(rollout.end_time - rollout.start_time)],
          ["Started", time(rollout.start_time)],
          ["Attempts", plural(view.attempts.length, "attempt")],
          ["Agents", agents.map((agent) => oneLine(agent, 60)).join(", ")],
          [
            "Resources",
            rollout.resources_id && (
              <a key="resources" href={href(["resources"], { id: rollout.resources_id })}>
                {rollout.resources_id}
              </a>
            ),
          ],
          ["Label", annotation.label && <Tag key="label">{annotation.label}</Tag>],
          ["Note", annotation.note],
          ["Corrected answer", annotation.answer],
          ["Tags", rollout.metadata.tags?.map((tag: string) => <Tag key={tag}>{tag}</Tag>)],
        ]}
      />
    </>
  );
}
