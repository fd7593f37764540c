// Runs, compared: which there are, and what each measured.
import { useState } from "preact/hooks";
import type { RunRow, RunSeries } from "../api";
import { Chart } from "../chart";
import { AXES, type Axis, colors, label, lines, type Prices, SECTIONS } from "../compare";
import { ago, count, duration, number, plural } from "../format";
import { Choice, Empty, Failed, Head, Status, Waiting } from "../parts";
import { type Loaded, request, useGet, useLoaded } from "../request";
import { ask, href, place } from "../route";
import { type Column, Table } from "../table";
import { RunDetails } from "./run";

const COMPARED = 6; // runs that are drawn unless others are chosen

export function Runs() {
  const [, one] = place.value.path;
  const runs = useGet<RunRow[]>("dashboard/runs", (happened) => ["reset", "metrics"].includes(happened.kind));
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
    </section>
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
    { name: "Status", width: "104px", cell: (row) => <Status value={row.status} /> },
    { name: "Step", width: "80px", align: "end", cell: (row) => progress(row) },
    { name: "Reward", width: "70px", align: "end", cell: (row) => number(row.last["reward"]) },
    { name: "", width: "96px", cell: (row) => <Sparkline values={row.sparkline} /> },
    { name: "Best val", width: "76px", align: "end", cell: (row) => number(row.best_val) },
    { name: "Tokens/s", width: "80px", align: "end", cell: (row) => number(row.last["tokens_per_second"]) },
    { name: "Took", width: "72px", align: "end", cell: (row) => duration(took(row)) },
    { name: "Started", width: "92px", align: "end", cell: (row) => ago(row.start_time) },
  ];
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

export function took(row: RunRow): number {
  return (row.end_time ?? Date.now() / 1000) - row.start_time;
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

/** The charts of some runs, and how they are drawn, which the URL keeps. */
export function Charts({ rows }: { rows: RunRow[] }) {
  const { query } = place.value;
  const [search, setSearch] = useState("");
  const axis = AXES.find((one) => one === query.get("x")) ?? "step";
  const smoothing = Math.min(0.99, Number(query.get("smooth") ?? 0) || 0);
  const log = query.get("scale") === "log";
  const spread = query.get("seeds") === "together";
  const prices: Prices = { read: Number(query.get("read") ?? 0.15), written: Number(query.get("written") ?? 0.6) };
  const ids = rows.map((row) => row.run_id);
  const known = useSeries(ids, []);
  const names = [...new Set((known.data ?? []).flatMap((one) => one.names))].sort();
  const sections = chosenSections(names, search);
  const wanted = sections.flatMap(([, inside]) => inside);
  const series = useSeries(wanted.length ? ids : [], wanted);
  return (
    <div class="compare">
      <div class="toolbar">
        <Choice label="Horizontal axis" options={AXES} value={axis} choose={(x: Axis) => ask({ x })} />
        <Choice
          label="Vertical scale"
          options={["linear", "log"]}
          value={log ? "log" : "linear"}
          choose={(scale) => ask({ scale })}
        />
        <Choice
          label="Seeds"
          options={["apart", "together"]}
          value={spread ? "together" : "apart"}
          choose={(seeds) => ask({ seeds })}
        />
        <label class="slider">
          Smoothing
          <input
            type="range"
            min="0"
            max="0.98"
            step="0.02"
            value={smoothing}
            onInput={(event) => ask({ smooth: event.currentTarget.value })}
          />
          <output>{smoothing.toFixed(2)}</output>
        </label>
        {axis === "cost" && <PriceFields prices={prices} />}
        <input
          type="search"
          placeholder="Metric"
          aria-label="Search metrics"
          value={search}
          onInput={(event) => setSearch(event.currentTarget.value)}
        />
      </div>
      {rows.length === 0 ? (
        <Empty>Choose runs to compare in the table above.</Empty>
      ) : (
        <Waiting loaded={known}>
          {() => names.length === 0 && <Empty>Nothing was measured yet. Curves begin with the first step.</Empty>}
        </Waiting>
      )}
      {series.error && <Failed message={series.error.message} again={series.reload} />}
      {sections.map(([title, inside]) => (
        <section class="charts" key={title} aria-label={title} aria-busy={series.data ? undefined : true}>
          <h2>{title}</h2>
          <div class="grid">
            {inside.map((name) => (
              <Chart
                key={name}
                title={name}
                lines={lines(name, rows, series.data ?? [], axis, prices, spread)}
                smoothing={smoothing}
                log={log}
                x={axis}
              />
            ))}
          </div>
        </section>
      ))}
    </div>
  );
}

function PriceFields({ prices }: { prices: Prices }) {
  return (
    <>
      {(["read", "written"] as const).map((side) => (
        <label class="price" key={side}>
          $ per 1M {side}
          <input
            type="number"
            min="0"
            step="0.01"
            value={prices[side]}
            onChange={(event) => ask({ [side]: event.currentTarget.value })}
          />
        </label>
      ))}
    </>
  );
}

function useSeries(run_ids: string[], names: string[]): Loaded<RunSeries[]> {
  const body = { run_ids, names };
  return useLoaded(
    run_ids.length ? JSON.stringify(body) : undefined,
    (signal) => request<RunSeries[]>("POST", "dashboard/series", body, signal),
    (happened) => ["reset", "metrics"].includes(happened.kind),
  );
}

function chosenSections(names: string[], search: string): [string, string[]][] {
  if (search) {
    const found = names.filter((name) => name.toLowerCase().includes(search.toLowerCase()));
    return found.length ? [[`${plural(found.length, "metric")} like “${search}”`, found.slice(0, 40)]] : [];
  }
  return SECTIONS.map(([title, inside]): [string, string[]] => [
    title,
    title === "Staleness"
      ? names.filter((name) => /stale|oldest/.test(name))
      : inside.filter((name) => names.includes(name)),
  ]).filter(([, inside]) => inside.length > 0);
}
