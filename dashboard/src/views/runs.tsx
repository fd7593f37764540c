// Runs, compared: which there are, and what each measured.
import type { RunRow } from "../api";
import { colors, differing, label, searched, took } from "../compare";
import { ago, count, duration, number, oneLine, plural, visible } from "../format";
import { Empty, Head, Status, Tag, Waiting } from "../parts";
import { useGet } from "../request";
import { ask, href, place } from "../route";
import { type Column, Table } from "../table";
import { Charts } from "./charts";
import { RunDetails } from "./run";
import { TasksOfRuns } from "./why";
import { useEvery } from "./workers";

const INTERVAL = 10000; // milliseconds
const COMPARED = 6; // runs that are drawn unless others are chosen
const SETTINGS = 3; // columns of settings unless others are chosen

export function Runs() {
  const [, one] = place.value.path;
  const runs = useGet<RunRow[]>("dashboard/runs", (happened) => ["reset", "metrics"].includes(happened.kind));
  // That a process has died is no event of the store.
  useEvery(INTERVAL, () => runs.data?.some((row) => row.status === "running") && runs.reload());
  return (
    <Waiting loaded={runs}>
      {(rows) => {
        if (rows.length === 0) return <NoRuns />;
        const shown = rows.find((row) => row.run_id === one);
        return shown ? <RunDetails key={shown.run_id} run={shown} /> : <Comparison rows={rows} />;
      }}
    </Waiting>
  );
}

function NoRuns() {
  return (
    <section class="view">
      <Head title="Runs" />
      <Empty>
        <p>
          No runs yet. Start one with <code>agl train</code>, or try <code>agl quickstart</code>: it trains a small
          agent in minutes. It appears here as soon as it has started.
        </p>
      </Empty>
    </section>
  );
}

function Comparison({ rows }: { rows: RunRow[] }) {
  const { query } = place.value;
  const found = rows.filter((row) => matches(row, query));
  const asked = query.get("runs");
  const chosenIds = asked === null ? found.slice(0, COMPARED).map((row) => row.run_id) : asked.split(",");
  const chosen = rows.filter((row) => chosenIds.includes(row.run_id));
  const shades = colors(chosen, query.get("seeds") === "each");
  const toggle = (id: string) => {
    const next = chosenIds.includes(id) ? chosenIds.filter((one) => one !== id) : [...chosenIds, id];
    ask({ runs: next.filter((one) => rows.some((row) => row.run_id === one)).join(",") || "none" });
    // The row moves to or from the chosen ones; whoever uses the keyboard goes on from it.
    requestAnimationFrame(() => document.getElementById(`compare-${id}`)?.focus({ preventScroll: true }));
  };
  const listed = [...chosen, ...found.filter((row) => !chosen.includes(row))];
  const settings = differing(listed);
  const shownSettings = query.get("cols")?.split(",") ?? settings.slice(0, SETTINGS);
  return (
    <section class="view runs">
      <Head title="Runs" note={plural(rows.length, "run")} link={{ runs: chosenIds.join(",") || "none" }} />
      <Filters rows={rows} found={found.length} settings={settings} shown={shownSettings} />
      <div class="run-table">
        <Table
          label="Runs"
          rows={listed}
          columns={columnsOf(listed, chosenIds, shades, shownSettings, toggle)}
          id={(row) => row.run_id}
          href={(row) => href(["runs", row.run_id])}
        />
      </div>
      <Charts rows={chosen} />
      {chosen.length > 1 && <TasksOfRuns rows={chosen} />}
      {chosen.length > 1 && <Differences rows={chosen} />}
    </section>
  );
}

/** Whether a run is what the filters ask for. */
function matches(row: RunRow, query: URLSearchParams): boolean {
  const asked = (name: string, of: (string | null)[]) => !query.get(name) || of.includes(query.get(name));
  const words = (query.get("find") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  return (
    asked("status", [row.status]) &&
    asked("tag", row.tags) &&
    asked("agent", [row.agent]) &&
    words.every((word) => searched(row).includes(word))
  );
}

interface FilterProperties {
  rows: RunRow[];
  found: number;
  settings: string[];
  shown: string[];
}

function Filters({ rows, found, settings, shown }: FilterProperties) {
  const { query } = place.value;
  const pick = (name: string, hint: string, options: (string | null)[]) => {
    const known = [...new Set(options.filter((option) => option !== null))].sort();
    if (known.length < 2 && !query.get(name)) return null;
    return (
      <select
        aria-label={hint}
        value={query.get(name) ?? ""}
        onChange={(event) => ask({ [name]: event.currentTarget.value })}
      >
        <option value="">{hint}</option>
        {known.map((option) => (
          <option key={option} value={option}>
            {visible(option)}
          </option>
        ))}
      </select>
    );
  };
  const turn = (name: string) => {
    const next = shown.includes(name) ? shown.filter((one) => one !== name) : [...shown, name];
    ask({ cols: next.join(",") || "none" });
  };
  const filtered = ["find", "status", "tag", "agent"].some((name) => query.get(name));
  return (
    <div class="toolbar" role="search">
      <input
        type="search"
        placeholder="Name, tag, setting=value"
        aria-label="Search runs"
        value={query.get("find") ?? ""}
        onInput={(event) => ask({ find: event.currentTarget.value })}
      />
      {pick("status", "Any status", rows.map((row) => row.status))}
      {pick("tag", "Any tag", rows.flatMap((row) => row.tags))}
      {pick("agent", "Any agent", rows.map((row) => row.agent))}
      {settings.length > 0 && (
        <details class="how">
          <summary>Columns of settings</summary>
          <div class="popover" role="group" aria-label="Settings that differ between these runs">
            {settings.map((name) => (
              <label class="check" key={name}>
                <input type="checkbox" checked={shown.includes(name)} onChange={() => turn(name)} />
                {visible(name)}
              </label>
            ))}
          </div>
        </details>
      )}
      {filtered && (
        <>
          <span class="note">{plural(found, "run")} found</span>
          <button
            type="button"
            class="quiet"
            onClick={() => ask({ find: undefined, status: undefined, tag: undefined, agent: undefined })}
          >
            Clear
          </button>
        </>
      )}
    </div>
  );
}

/** The settings that differ between the chosen runs, side by side. */
function Differences({ rows }: { rows: RunRow[] }) {
  const names = differing(rows);
  return (
    <details class="block" open>
      <summary>Settings that differ</summary>
      {names.length === 0 ? (
        <p class="muted">
          These runs have the same settings{rows.some((row) => row.seed !== rows[0]?.seed) && " and different seeds"}.
        </p>
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label="Settings that differ">
          <table class="settings">
            <thead>
              <tr>
                <th scope="col">Setting</th>
                {rows.map((row) => (
                  <th scope="col" key={row.run_id}>
                    {visible(label(row))}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {names.map((name) => (
                <tr key={name}>
                  <th scope="row">{visible(name)}</th>
                  {rows.map((row) => (
                    <td key={row.run_id}>{visible(row.settings[name] ?? "—")}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </details>
  );
}

function columnsOf(
  rows: RunRow[],
  chosen: string[],
  shades: Map<string, string>,
  settings: string[],
  toggle: (id: string) => void,
): Column<RunRow>[] {
  const why: Column<RunRow> = { name: "Why", width: "minmax(110px, 1.4fr)", cell: (row) => <Why row={row} /> };
  const tags: Column<RunRow> = {
    name: "Tags",
    width: "minmax(70px, 0.8fr)",
    cell: (row) => row.tags.map((tag) => <Tag key={tag}>{tag}</Tag>),
  };
  return [
    { name: "Run", width: "minmax(136px, 1.4fr)", cell: (row) => <RunName row={row} /> },
    {
      name: "Shown",
      width: "56px",
      cell: (row) => (
        <label class="pick">
          <input
            type="checkbox"
            id={`compare-${row.run_id}`}
            checked={chosen.includes(row.run_id)}
            onChange={() => toggle(row.run_id)}
            aria-label={`Compare ${label(row)}`}
          />
          <i class="dot" style={{ background: `var(${shades.get(row.run_id) ?? "--line"})` }} />
        </label>
      ),
    },
    { name: "Status", width: "88px", cell: (row) => <RunStatus row={row} /> },
    ...(rows.some((row) => whyOf(row)) ? [why] : []),
    ...(rows.some((row) => row.tags.length) ? [tags] : []),
    { name: "Step", width: "64px", align: "end", cell: (row) => progress(row) },
    { name: "Reward", width: "52px", align: "end", cell: (row) => number(row.last["reward"]) },
    { name: "Curve", width: "92px", cell: (row) => <Sparkline values={row.sparkline} /> },
    { name: "Best val", width: "54px", align: "end", cell: (row) => number(row.best_val) },
    ...settings.flatMap((name) => settingColumn(name)),
    { name: "Failed", width: "40px", align: "end", cell: (row) => (row.failed ? <Failed row={row} /> : "") },
    { name: "Tokens/s", width: "56px", align: "end", cell: (row) => number(row.last["tokens_per_second"]) },
    { name: "Took", width: "56px", align: "end", cell: (row) => duration(took(row)) },
    { name: "Started", width: "70px", align: "end", cell: (row) => ago(row.start_time) },
  ];
}

/** `algorithm.group_size` is headed `group_size`. */
function settingColumn(name: string): Column<RunRow>[] {
  if (name === "none") return [];
  const cell = (row: RunRow) => <span title={visible(row.settings[name] ?? "")}>{oneLine(row.settings[name] ?? "—", 60)}</span>;
  return [{ name: visible(name.split(".").at(-1) ?? name), id: name, title: visible(name), width: "80px", cell }];
}

/** Why a run ended, where it did not end well, or what to say of its result. */
function whyOf(row: RunRow): string | null {
  if (row.status === "succeeded" || row.status === "running") return row.conclusion;
  return row.reason ?? row.lost;
}

function Why({ row }: { row: RunRow }) {
  const text = whyOf(row);
  if (text === null) return null;
  return (
    <span class={row.status === "succeeded" ? "amber" : "error"} title={visible(text)}>
      {oneLine(text, 90)}
    </span>
  );
}

function RunStatus({ row }: { row: RunRow }) {
  return (
    <span title={row.lost ?? undefined}>
      <Status value={row.status} doubtful={row.status === "running" ? row.lost !== null : row.failed > 0} />
    </span>
  );
}

/** How many rollouts have failed; the link leads to them. */
function Failed({ row }: { row: RunRow }) {
  return (
    <a class="failed" href={href(["rollouts"], { run: row.run_id, status: "failed" })}>
      {count(row.failed)}
    </a>
  );
}

function RunName({ row }: { row: RunRow }) {
  return (
    <>
      {visible(label(row))} {row.seed !== null && <span class="muted">{row.run_id}</span>}
    </>
  );
}

function progress(row: RunRow): string {
  return row.total_steps ? `${count(row.steps)} / ${count(row.total_steps)}` : count(row.steps);
}

export function Sparkline({ values }: { values: number[] }) {
  if (values.length < 2) return null;
  const low = Math.min(0, ...values);
  const high = Math.max(1, ...values);
  const points = values.map(
    (value, index) => `${(index / (values.length - 1)) * 88},${19 - ((value - low) / (high - low)) * 18}`,
  );
  return (
    <svg class="sparkline" viewBox="0 0 88 20" width="88" height="20" aria-hidden="true">
      <polyline points={points.join(" ")} />
    </svg>
  );
}
