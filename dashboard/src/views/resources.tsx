// Every version of what agents receive: prompts and the models they call.
import type { LLM, PromptCandidate, PromptTemplate, ResourcesUpdate } from "../api";
import { ago, oneLine, plural, time } from "../format";
import { Code, Empty, Facts, Head, Json, Waiting } from "../parts";
import { useGet } from "../request";
import { href, place } from "../route";
import { type Column, Table } from "../table";

const COLUMNS: Column<ResourcesUpdate>[] = [
  { name: "Version", width: "60px", cell: (row) => String(row.version) },
  { name: "Id", width: "minmax(80px, 1fr)", cell: (row) => row.resources_id },
  { name: "Holds", width: "minmax(80px, 2fr)", cell: (row) => oneLine(Object.keys(row.resources).join(", "), 80) },
  { name: "Run", width: "minmax(60px, 1fr)", cell: (row) => oneLine(row.run_id ?? row.metadata["run_id"] ?? "", 80) },
  { name: "Made", width: "90px", align: "end", cell: (row) => ago(row.create_time) },
];

export function Resources() {
  const loaded = useGet<ResourcesUpdate[]>("resources", (happened) => ["reset", "metrics"].includes(happened.kind));
  const asked = place.value.query.get("id");
  return (
    <section class="view">
      <Waiting loaded={loaded}>
        {(versions) => {
          const rows = [...versions].reverse();
          const shown = rows.find((row) => row.resources_id === asked) ?? rows[0];
          return (
            <>
              <Head title="Resources" note={plural(rows.length, "version")} />
              {shown === undefined ? (
                <Empty>No resources yet. A run stores what its agents receive when it starts.</Empty>
              ) : (
                <div class="split">
                  <Table
                    label="Versions"
                    rows={rows}
                    columns={COLUMNS}
                    id={(row) => row.resources_id}
                    href={(row) => href(["resources"], { id: row.resources_id })}
                    selected={(row) => row === shown}
                  />
                  <One version={shown} />
                </div>
              )}
            </>
          );
        }}
      </Waiting>
    </section>
  );
}

function One({ version }: { version: ResourcesUpdate }) {
  return (
    <article class="detail" aria-label={`Version ${version.version}`}>
      <h2>Version {version.version}</h2>
      <Facts
        facts={[
          ["Id", version.resources_id],
          ["Made", time(version.create_time)],
          ["From", version.parent_id],
          ["Run", version.run_id && <a href={href(["runs", version.run_id])}>{version.run_id}</a>],
        ]}
      />
      {Object.entries(version.resources).map(([name, resource]) => (
        <section key={name}>
          <h3>{name}</h3>
          <OneResource name={name} resource={resource} />
        </section>
      ))}
      {Object.keys(version.metadata).length > 0 && (
        <>
          <h3>Metadata</h3>
          <Json value={version.metadata} label="the metadata" />
        </>
      )}
    </article>
  );
}

function OneResource({ name, resource }: { name: string; resource: LLM | PromptCandidate | PromptTemplate }) {
  if (resource.resource_type === "prompt_template") {
    return (
      <>
        <p class="note">A prompt template, {resource.engine}</p>
        <Code text={resource.template} label={name} />
      </>
    );
  }
  if (resource.resource_type === "prompts") {
    return (
      <>
        <p class="note">Texts that replace those of an unchanged agent</p>
        {Object.entries(resource.components).map(([component, { text }]) => (
          <section key={component}>
            <h4>{component}</h4>
            <Code text={text} label={component} />
          </section>
        ))}
      </>
    );
  }
  return (
    <Facts
      facts={[
        ["Model", resource.model],
        ["Endpoint", resource.endpoint],
        ["Sampling", oneLine(resource.sampling_parameters)],
      ]}
    />
  );
}
