// One chart of one measurement: a line per run, over whatever the viewer compares by. It knows uPlot, which draws on a
// canvas; the values under the pointer are text beside it.
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { saveCsv, savePng } from "./download";
import { number } from "./format";
import { color, theme } from "./theme";
import { short, shownRange, tickLabels } from "./ticks";

export interface Line {
  name: string;
  /** A custom property, such as `--series-0`. */
  color: string;
  x: number[];
  y: (number | null)[];
  /** Of several seeds, the lowest and highest at each x. */
  low?: (number | null)[];
  high?: (number | null)[];
  /** Of one run, which it is and the step of each point. */
  run_id?: string;
  step?: number[];
}

interface Properties {
  title: string;
  lines: Line[];
  smoothing: number;
  log: boolean;
  x: "step" | "time" | "rollouts" | "tokens" | "cost";
  height?: number;
  /** Called with the point of a run that was clicked. */
  open: (run_id: string, step: number) => void;
  /** Whether it is among the charts that stand first; without `pin` it cannot be. */
  pinned?: boolean;
  pin?: () => void;
}

interface Pointed {
  x: number;
  values: { name: string; color: string; value: number }[];
}

/** Steps of a time axis that people count in. */
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];

/** Steps of an axis that counts. */
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9].flatMap((unit) => [unit, 2 * unit, 5 * unit]);

/** Charts on one page share the pointer's place. */
const pointer = uPlot.sync("runs");

export function Chart({ title, lines, smoothing, log, x, height = 150, open, pinned, pin }: Properties) {
  const holder = useRef<HTMLDivElement>(null);
  const [pointed, setPointed] = useState<Pointed>();
  const drawn = useRef<uPlot | undefined>(undefined);
  const zoomed = useRef(false);
  const look = theme.value;
  const { data, about } = prepared(lines, smoothing, log);
  const shape = JSON.stringify([about.map(({ kind, name, color }) => [kind, name, color]), log, x, look]);
  const latest = useRef({ about, lines, open });
  latest.current = { about, lines, open };
  useEffect(() => {
    const place = holder.current;
    if (!place) return;
    const told = (plot: uPlot) => setPointed(under(plot, latest.current.about));
    const plot = new uPlot(options(place.clientWidth, height, latest.current.about, log, x, told), data, place);
    drawn.current = plot;
    zoomed.current = false;
    // A zoom of y leaves the other charts as they are: there all is selected.
    const isPart = ({ select, over }: uPlot) => select.width < over.clientWidth || select.height < over.clientHeight;
    plot.hooks.setSelect = [(selected) => (zoomed.current ||= isPart(selected))];
    const zoomedOut = (event: MouseEvent) => {
      if ((event.target as Element).classList.contains("u-over")) zoomed.current = false;
    };
    document.addEventListener("dblclick", zoomedOut, true);
    plot.over.addEventListener("click", () => {
      const { line, at } = nearest(plot, latest.current.lines) ?? {};
      if (line?.run_id && at !== undefined) latest.current.open(line.run_id, line.step?.[at] ?? 0);
    });
    pointer.sub(plot);
    const resized = new ResizeObserver(() => plot.setSize({ width: place.clientWidth, height }));
    resized.observe(place);
    return () => {
      document.removeEventListener("dblclick", zoomedOut, true);
      resized.disconnect();
      pointer.unsub(plot);
      plot.destroy();
      drawn.current = undefined;
    };
  }, [shape, height]);
  useEffect(() => {
    const plot = drawn.current;
    if (plot === undefined || plot.data === data) return;
    plot.setData(data, !zoomed.current); // what was zoomed into stays while values come in
    if (zoomed.current) plot.redraw();
  }, [JSON.stringify(data)]);
  const newest = about.filter((one) => one.kind === "line").map((one) => one.last);
  return (
    <figure class="chart">
      <figcaption>
        <span class="name" title={`${title}. Drag to zoom in, double-click to zoom out.`}>
          {title}
        </span>
        <span class="values">
          {pointed?.values.length
            ? pointed.values.slice(0, 4).map((one) => (
                <span class="value" key={one.name} title={one.name}>
                  <i class="dot" style={{ background: `var(${one.color})` }} />
                  {number(one.value)}
                </span>
              ))
            : newest.length === 1 && <span class="value">{number(newest[0])}</span>}
        </span>
        <span class="tools">
          <button type="button" onClick={() => saveCsv(title, x, lines)} aria-label={`Download ${title} as CSV`}>
            csv
          </button>
          <button
            type="button"
            onClick={() => drawn.current && savePng(title, drawn.current.ctx.canvas, lines)}
            aria-label={`Download ${title} as PNG`}
          >
            png
          </button>
          {pin && (
            <button
              type="button"
              onClick={pin}
              aria-pressed={pinned}
              aria-label={`Pin ${title}`}
              title={pinned ? "No longer among the first charts" : "Show among the first charts"}
            >
              {pinned ? "★" : "☆"}
            </button>
          )}
        </span>
      </figcaption>
      <div ref={holder} class="plot" role="img" aria-label={spoken(title, about)} />
    </figure>
  );
}

function spoken(title: string, about: Drawn[]): string {
  const ends = about.filter((one) => one.kind === "line").map((one) => `${one.name}: last ${number(one.last)}`);
  return `${title}. ${ends.join("; ")}`;
}

/** What each of uPlot's series is, in its order (the first is x). */
interface Drawn {
  kind: "line" | "raw" | "low" | "high";
  name: string;
  color: string;
  last: number | null;
}

function prepared(lines: Line[], smoothing: number, log: boolean): { data: uPlot.AlignedData; about: Drawn[] } {
  const tables: uPlot.AlignedData[] = [];
  const about: Drawn[] = [];
  for (const line of lines) {
    const usable = (y: (number | null)[]) => (log ? y.map((one) => (one !== null && one > 0 ? one : null)) : y);
    const columns: (number | null)[][] = [];
    const add = (kind: Drawn["kind"], y: (number | null)[]) => {
      columns.push(usable(y));
      about.push({ kind, name: line.name, color: line.color, last: y.findLast((one) => one !== null) ?? null });
    };
    if (line.low && line.high) {
      add("high", smoothed(line.high, smoothing));
      add("low", smoothed(line.low, smoothing));
    } else if (smoothing > 0 && !isFew(line.y)) add("raw", line.y);
    add("line", smoothed(line.y, smoothing));
    tables.push([line.x, ...columns] as uPlot.AlignedData);
  }
  return { data: tables.length ? uPlot.join(tables) : [[]], about };
}

const FEW = 12; // points, of which each has to be seen as it is

function isFew(y: readonly (number | null | undefined)[]): boolean {
  return y.filter((value) => value !== null && value !== undefined).length <= FEW;
}

/** An exponential moving average, without the pull of its start towards zero. */
function smoothed(y: (number | null)[], weight: number): (number | null)[] {
  if (weight === 0 || isFew(y)) return y;
  let mean = 0;
  let mass = 0;
  return y.map((one) => {
    if (one === null) return null;
    mean = weight * mean + (1 - weight) * one;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

function options(
  width: number,
  height: number,
  about: Drawn[],
  log: boolean,
  x: Properties["x"],
  told: (plot: uPlot) => void,
): uPlot.Options {
  const faint = color("--faint");
  const grid = { stroke: color("--line-soft"), width: 1 };
  const axis = { stroke: faint, grid, ticks: { show: false }, font: "11px system-ui" };
  return {
    width,
    height,
    legend: { show: false },
    padding: [8, 8, 0, 0],
    cursor: { sync: { key: pointer.key, scales: ["x", null] }, points: { size: 5 }, drag: { x: true, y: true, uni: 25 } },
    scales: {
      x: { time: false },
      y: { distr: log ? 3 : 1, range: log ? (_, low, high) => uPlot.rangeLog(low, high, 10, false) : padded },
    },
    hooks: { setCursor: [told] },
    axes: [
      {
        ...axis,
        size: 24,
        ...(x === "cost" ? {} : { incrs: x === "time" ? SECONDS : WHOLE }),
        values: (_, ticks, __, ___, step) => (x === "time" ? ticks.map(clock) : tickLabels(ticks, step)),
      },
      {
        ...axis,
        size: (_, labels) => 18 + DIGIT * Math.max(3, ...(labels ?? []).map((label) => label?.length ?? 0)),
        values: (_, ticks, __, ___, step) =>
          log ? ticks.map((tick) => (tick === null ? "" : short(tick))) : tickLabels(ticks, step),
      },
    ],
    bands: about.flatMap((one, place) =>
      one.kind === "high" ? [{ series: [place + 1, place + 2] as [number, number], fill: `${faded(one.color)}` }] : [],
    ),
    series: [
      {},
      ...about.map((one) => ({
        stroke: one.kind === "line" ? color(one.color) : faded(one.color),
        width: one.kind === "line" ? 1.6 : one.kind === "raw" ? 1 : 0,
        spanGaps: true,
        points: one.kind === "line" ? { show: few, size: 5 } : { show: false },
      })),
    ],
  };
}

const DIGIT = 6.2; // pixels

function padded(_: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax {
  return low === null || high === null ? [0, 1] : shownRange(low, high);
}

function few(plot: uPlot, place: number): boolean {
  return isFew(Array.from(plot.data[place] ?? []));
}

/** The colour, mostly transparent. */
function faded(name: string): string {
  return color(name).replace(/rgba?\(([^)]*)\)/, (_, parts: string) => {
    const [red, green, blue] = parts.split(/[ ,/]+/);
    return `rgba(${red}, ${green}, ${blue}, 0.22)`;
  });
}

function under(plot: uPlot, about: Drawn[]): Pointed | undefined {
  const place = plot.cursor.idx;
  if (place === null || place === undefined) return undefined;
  const values = about.flatMap((one, index) => {
    const value = plot.data[index + 1]?.[place];
    return one.kind === "line" && typeof value === "number" ? [{ name: one.name, color: one.color, value }] : [];
  });
  return { x: plot.data[0][place] ?? 0, values };
}

/** The point that is nearest to the pointer, and its place in its line. */
function nearest(plot: uPlot, lines: Line[]): { line: Line; at: number } | undefined {
  const { left = 0, top = 0 } = plot.cursor;
  const points = lines.flatMap((line) =>
    line.y.flatMap((y, at) => {
      const x = line.x[at];
      if (y === null || x === undefined) return [];
      return [{ line, at, far: Math.hypot(plot.valToPos(x, "x") - left, plot.valToPos(y, "y") - top) }];
    }),
  );
  return points.reduce<(typeof points)[0] | undefined>((best, one) => (best && best.far <= one.far ? best : one), undefined);
}

/** Seconds from the run's start. */
function clock(seconds: number): string {
  if (seconds < 60) return `${seconds} s`;
  return seconds < 3600 ? `${Number((seconds / 60).toFixed(1))} min` : `${Number((seconds / 3600).toFixed(1))} h`;
}
