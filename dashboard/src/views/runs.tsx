// Runs, compared: which there are, and what each measured.
import type { RunRow } from "../api";
import { colors, label, took } from "../compare";
import { ago, count, duration, number, plural } from "../format";
import { Empty, Head, Status, Waiting } from "../parts";
import { useGet } from "../request";
import { ask, href, place } from "../route";
import { type Column, Table } from "../table";
import { Charts } from "./charts";
import { RunDetails } from "./run";
import { useEvery } from "./workers";

const INTERVAL = 10000; // milliseconds
const COMPARED = 6; // runs that are drawn unless others are chosen

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
  const asked = place.value.query.get("runs");
  const chosenIds = asked === null ? rows.slice(0, COMPARED).map((row) => row.run_id) : asked.split(",");
  const chosen = rows.filter((row) => chosenIds.includes(row.run_id));
  const spread = place.value.query.get("seeds") === "together";
  const shades = colors(chosen, !spread);
  const toggle = (id: string) => {
    const next = chosenIds.includes(id) ? chosenIds.filter((one) => one !== id) : [...chosenIds, id];
    ask({ runs: next.filter((one) => rows.some((row) => row.run_id === one)).join(",") || "none" });
  };
  return (
    <section class="view runs">
      <Head title="Runs" note={plural(rows.length, "run")} />
      <div class="run-table">
        <Table
          label="Runs"
          rows={rows}
          columns={columnsOf(chosenIds, shades, toggle)}
          id={(row) => row.run_id}
          href={(row) => href(["runs", row.run_id])}
        />
      </div>
      <Charts rows={chosen} />
      {chosen.length > 1 && <Differences rows={chosen} />}
    </section>
  );
}

/** The settings that differ between the chosen runs, side by side. */
function Differences({ rows }: { rows: RunRow[] }) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.settings)))].sort();
  const differing = names.filter((name) => new Set(rows.map((row) => row.settings[name])).size > 1);
  return (
    <details class="block" open>
      <summary>Settings that differ</summary>
      {differing.length === 0 ? (
        <p class="muted">These runs have the same settings{rows.some((row) => row.seed !== rows[0]?.seed) && ", with other seeds"}.</p>
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label="Settings that differ">
          <table class="settings">
            <thead>
              <tr>
                <th scope="col">Setting</th>
                {rows.map((row) => (
                  <th scope="col" key={row.run_id}>
                    {label(row)}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {differing.map((name) => (
                <tr key={name}>
                  <th scope="row">{name}</th>
                  {rows.map((row) => (
                    <td key={row.run_id}>{row.settings[name] ?? "—"}</td>
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

function columnsOf(chosen: string[], shades: Map<string, string>, toggle: (id: string) => void): Column<RunRow>[] {
  return [
    { name: "Run", width: "minmax(120px, 1.4fr)", cell: (row) => <RunName row={row} /> },
    {
      name: "Shown",
      width: "56px",
      cell: (row) => (
        <label class="pick">
          <input
            type="checkbox"
            checked={chosen.includes(row.run_id)}
            onChange={() => toggle(row.run_id)}
            aria-label={`Compare ${label(row)}`}
          />
          <i class="dot" style={{ background: `var(${shades.get(row.run_id) ?? "--line"})` }} />
        </label>
      ),
    },
    { name: "Status", width: "104px", cell: (row) => <RunStatus row={row} /> },
    { name: "Failed", width: "64px", align: "end", cell: (row) => (row.failed ? <Failed row={row} /> : "") },
    { name: "Step", width: "80px", align: "end", cell: (row) => progress(row) },
    { name: "Reward", width: "70px", align: "end", cell: (row) => number(row.last["reward"]) },
    { name: "Curve", width: "96px", cell: (row) => <Sparkline values={row.sparkline} /> },
    { name: "Best val", width: "76px", align: "end", cell: (row) => number(row.best_val) },
    { name: "Tokens/s", width: "80px", align: "end", cell: (row) => number(row.last["tokens_per_second"]) },
    { name: "Took", width: "72px", align: "end", cell: (row) => duration(took(row)) },
    { name: "Started", width: "92px", align: "end", cell: (row) => ago(row.start_time) },
  ];
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
      {label(row)} {row.seed !== null && <span class="muted">{row.run_id}</span>}
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
