// What runs measured, drawn.
import { useState } from "preact/hooks";
import type { RunRow, RunSeries } from "../api";
import { Chart } from "../chart";
import { AXES, type Axis, lines, type Prices, SECTIONS } from "../compare";
import { plural } from "../format";
import { Choice, Empty, Failed, Waiting } from "../parts";
import { type Loaded, request, useLoaded } from "../request";
import { ask, go, href, place } from "../route";

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
                open={openStep(name)}
              />
            ))}
          </div>
        </section>
      ))}
    </div>
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
