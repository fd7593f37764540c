// What runs measured, drawn.
import type { RunRow, RunSeries } from "../api";
import { Chart } from "../chart";
import { AXES, type Axis, colors, label, lines, type Prices, SECTIONS } from "../compare";
import { plural, visible } from "../format";
import { Choice, Empty, Failed, Waiting } from "../parts";
import { remembered } from "../remembered";
import { type Loaded, request, useLoaded } from "../request";
import { ask, go, href, place } from "../route";

/** The charts of some runs, and how they are drawn, which the URL keeps. */
export function Charts({ rows }: { rows: RunRow[] }) {
  const { query } = place.value;
  const search = query.get("metric") ?? "";
  const axis = AXES.find((one) => one === query.get("x")) ?? "step";
  const smoothing = Math.min(0.99, Number(query.get("smooth") ?? 0) || 0);
  const log = query.get("scale") === "log";
  const spread = query.get("seeds") !== "each";
  const prices: Prices = { read: Number(query.get("read") ?? 0.15), written: Number(query.get("written") ?? 0.6) };
  const ids = rows.map((row) => row.run_id);
  const known = useSeries(ids, []);
  const names = [...new Set((known.data ?? []).flatMap((one) => one.names))].sort();
  const sections = chosenSections(names, search);
  const open = sections.filter(([title]) => search || opened.names.value.includes(title));
  const wanted = [...new Set(open.flatMap(([, inside]) => inside))].sort(); // so that a pin loads nothing anew
  const series = useSeries(wanted.length ? ids : [], wanted);
  const drawn = (name: string) => lines(name, rows, series.data ?? [], axis, prices, spread);
  return (
    <div class="compare">
      <div class="toolbar">
        <Choice label="Horizontal axis" options={AXES} value={axis} titles={OVER} choose={(x: Axis) => ask({ x })} />
        <Choice
          label="Vertical scale"
          options={["linear", "log"]}
          value={log ? "log" : "linear"}
          titles={{ log: "Logarithmic: values of 0 and below are left out" }}
          choose={(scale) => ask({ scale })}
        />
        {new Set(rows.map((row) => row.family)).size < rows.length && (
          <Choice
            label="Seeds"
            options={["mean of seeds", "each seed"]}
            value={spread ? "mean of seeds" : "each seed"}
            titles={SEEDS}
            choose={(seeds) => ask({ seeds: seeds === "each seed" ? "each" : undefined })}
          />
        )}
        <label class="slider" title="An exponential moving average with this weight">
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
          onInput={(event) => ask({ metric: event.currentTarget.value })}
        />
      </div>
      {rows.length > 1 && <Legend rows={rows} spread={spread} />}
      {rows.length === 0 ? (
        <Empty>Choose runs to compare in the table above.</Empty>
      ) : (
        <Waiting loaded={known}>
          {() => names.length === 0 && <Empty>{rows.some((row) => row.status === "running") ? BEFORE : NEVER}</Empty>}
        </Waiting>
      )}
      {series.error && <Failed message={series.error.message} again={series.reload} />}
      {sections.map(([title, inside]) => (
        <section class="charts" key={title} aria-label={title} aria-busy={series.data || !wanted.length ? undefined : true}>
          <h2>
            <button
              type="button"
              class="quiet"
              aria-expanded={open.some(([name]) => name === title)}
              onClick={() => opened.toggle(title)}
            >
              {title} <span class="muted">{inside.length}</span>
            </button>
          </h2>
          {open.some(([name]) => name === title) && (
            <div class="grid">
              {inside.map((name) => (
                <Chart
                  key={name}
                  title={name}
                  lines={drawn(name)}
                  smoothing={smoothing}
                  log={log}
                  x={axis}
                  open={openStep(name)}
                  pinned={pinned.names.value.includes(name)}
                  pin={() => pinned.toggle(name)}
                />
              ))}
            </div>
          )}
        </section>
      ))}
    </div>
  );
}

/** Which colour is which run, or which runs that differ only in their seed. */
function Legend({ rows, spread }: { rows: RunRow[]; spread: boolean }) {
  const shades = colors(rows, !spread);
  const shown = spread ? rows.filter((row, at) => rows.findIndex((one) => one.family === row.family) === at) : rows;
  return (
    <ul class="legend" aria-label="Legend">
      {shown.map((row) => {
        const alike = spread ? rows.filter((one) => one.family === row.family) : [row];
        return (
          <li key={row.run_id}>
            <i class="dot" style={{ background: `var(${shades.get(row.run_id) ?? "--accent"})` }} />
            <a href={href(["runs", row.run_id])}>{visible(label(row))}</a>{" "}
            {alike.length > 1 && (
              <span class="muted" title={alike.map((one) => visible(label(one))).join(", ")}>
                and {plural(alike.length - 1, "other seed")}, mean ± standard deviation
              </span>
            )}
          </li>
        );
      })}
    </ul>
  );
}

/** Goes to the rollouts that a step's point of this metric comes from. */
export function openStep(name: string): (run: string, step: number) => void {
  const mode = name.startsWith("val_") ? "val" : "train";
  return (run, step) => go(href(["rollouts"], { run, step: String(step), mode }));
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

const BEFORE = "Nothing was measured yet. Curves begin with the first step.";
const NEVER = "Nothing was measured: it ended before its first step.";

const PINNED = "Pinned";
const pinned = remembered("agentlightning.pinned", []);
const opened = remembered("agentlightning.sections", [PINNED, "Reward", "Policy", "Length"]);

const OVER: Partial<Record<Axis, string>> = {
  time: "Seconds since the run's start",
  rollouts: "Rollouts trained on so far",
  tokens: "Tokens sampled so far",
  cost: "What the tokens so far would have cost at the prices given",
};

const SEEDS = {
  "mean of seeds": "Runs that differ only in their seed are one line, with a band of one standard deviation, over the steps that at least half of them measured",
  "each seed": "A line for each run",
};

function chosenSections(names: string[], search: string): [string, string[]][] {
  if (search) {
    const found = names.filter((name) => name.toLowerCase().includes(search.toLowerCase()));
    return found.length ? [[`${plural(found.length, "metric")} like “${search}”`, found.slice(0, 40)]] : [];
  }
  const first: [string, string[]] = [PINNED, pinned.names.value.filter((name) => names.includes(name))];
  const others = SECTIONS.map(([title, inside]): [string, string[]] => [
    title,
    title === "Staleness"
      ? names.filter((name) => /stale|oldest/.test(name))
      : inside.filter((name) => names.includes(name)),
  ]);
  const unpinned = others.map(([title, inside]): [string, string[]] => [
    title,
    inside.filter((name) => !first[1].includes(name)),
  ]);
  return [first, ...unpinned].filter(([, inside]) => inside.length > 0);
}
