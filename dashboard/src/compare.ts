// Runs side by side: which line each is, over what, and the seeds of one family as one line with its spread. Pure.
import type { RunRow, RunSeries } from "./api";
import type { Line } from "./chart";
import { SERIES } from "./theme";

export const AXES = ["step", "time", "rollouts", "tokens", "cost"] as const;
export type Axis = (typeof AXES)[number];

/** Dollars per million tokens. */
export interface Prices {
  read: number;
  written: number;
}

/** What is drawn first, in sections; what else a run measured is found by its name. */
export const SECTIONS: [title: string, names: string[]][] = [
  ["Reward", ["reward", "val_reward", "advantage_std", "groups_without_variance"]],
  ["Policy", ["entropy", "behaviour_kl", "reference_kl", "clip_fraction", "ratio_max", "grad_norm", "loss"]],
  ["Length", ["response_tokens_mean", "response_tokens_max", "prompt_tokens_mean"]],
  ["Fidelity", ["inference_mismatch", "inference_kl", "unmerged/rollouts", "calls_excluded", "unrewarded"]],
  ["Staleness", ["staleness/0", "staleness/1", "staleness/2", "staleness_mean", "policy_version_oldest"]],
  ["Speed", ["tokens_per_second", "rollouts_per_second", "engine_tokens_per_second", "learner_tokens_per_second"]],
  ["Idle", ["engine_idle", "learner_idle", "tree_savings"]],
];

export function label(run: RunRow): string {
  return run.name ?? `${run.kind} ${run.seed === null ? run.run_id : `seed ${run.seed}`}`;
}

/** What a search in the list of runs looks through. */
export function searched(run: RunRow): string {
  const settings = Object.entries(run.settings).map(([name, value]) => `${name}=${value}`);
  const texts = [label(run), run.run_id, run.kind, run.agent, run.reason, ...run.tags, ...settings];
  return texts.join("\n").toLowerCase();
}

/** The settings that differ between some runs, by name. That runs of one kind lack those of another does not count. */
export function differing(rows: RunRow[]): string[] {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.settings)))].sort();
  return names.filter((name) => {
    const kinds = new Set(rows.filter((row) => name in row.settings).map((row) => row.kind));
    return new Set(rows.filter((row) => kinds.has(row.kind)).map((row) => row.settings[name])).size > 1;
  });
}

/** Seconds from its start to its end, or to now. */
export function took(row: RunRow): number {
  return (row.end_time ?? Date.now() / 1000) - row.start_time;
}

export function colors(chosen: RunRow[], bySeed: boolean): Map<string, string> {
  const keys = [...new Set(chosen.map((run) => (bySeed ? run.run_id : run.family)))];
  return new Map(
    chosen.map((run) => [
      run.run_id,
      SERIES[keys.indexOf(bySeed ? run.run_id : run.family) % SERIES.length] ?? "--accent",
    ]),
  );
}

export function along(series: RunSeries, axis: Axis, prices: Prices): number[] {
  switch (axis) {
    case "step":
      return series.step;
    case "time":
      return series.seconds;
    case "rollouts":
      return series.rollouts;
    case "tokens":
      return series.tokens_written;
    case "cost":
      return series.step.map(
        (_, place) =>
          ((series.tokens_read[place] ?? 0) * prices.read + (series.tokens_written[place] ?? 0) * prices.written) / 1e6,
      );
  }
}

/** The lines of one measurement: one per run, or one per family. */
export function lines(name: string, rows: RunRow[], all: RunSeries[], axis: Axis, prices: Prices, spread: boolean) {
  const shades = colors(rows, !spread);
  const drawn = all.flatMap((series) => {
    const row = rows.find((one) => one.run_id === series.run_id);
    const y = series.values[name];
    if (!row || !y || y.every((one) => one === null)) return [];
    const line: Line = {
      name: rows.some((one) => one !== row && label(one) === label(row)) ? `${label(row)} ${row.run_id}` : label(row),
      color: shades.get(row.run_id) ?? "--accent",
      x: along(series, axis, prices),
      y,
      run_id: row.run_id,
      step: series.step,
    };
    return [{ row, series, line }];
  });
  if (!spread) return drawn.map((one) => one.line);
  const families = new Map<string, typeof drawn>();
  for (const one of drawn) families.set(one.row.family, [...(families.get(one.row.family) ?? []), one]);
  const shared = [...families.values()];
  const named = shared.map(([first, ...others]) => `${first?.row.kind}, ${others.length + 1} seeds`);
  return shared.flatMap((several, place) => {
    const name = named[place] ?? "";
    const alone = named.indexOf(name) === named.lastIndexOf(name);
    return together(several, alone ? name : `${name} (${several[0] && label(several[0].row)} …)`);
  });
}

/** The mean of several seeds, and one standard deviation to either side, at each step that at least two and half of
 * them measured. */
function together(several: { row: RunRow; series: RunSeries; line: Line }[], name: string): Line[] {
  const [first] = several;
  if (!first) return [];
  if (several.length === 1) return [first.line];
  const at = new Map<number, { x: number[]; y: number[] }>();
  for (const { series, line } of several) {
    series.step.forEach((step, place) => {
      const value = line.y[place];
      const x = line.x[place];
      if (value === null || value === undefined || x === undefined) return;
      const here = at.get(step) ?? { x: [], y: [] };
      here.x.push(x);
      here.y.push(value);
      at.set(step, here);
    });
  }
  const enough = Math.max(2, several.length / 2); // lest the line jump where seeds end
  const points = [...at.entries()]
    .filter(([, point]) => point.y.length >= enough)
    .sort(([one], [other]) => one - other)
    .map(([, point]) => point);
  if (points.length === 0) return several.map((one) => one.line);
  const mean = (values: number[]) => values.reduce((sum, one) => sum + one, 0) / values.length;
  const spread = (values: number[]) => Math.sqrt(mean(values.map((one) => (one - mean(values)) ** 2)));
  return [
    {
      name,
      color: first.line.color,
      x: points.map((point) => mean(point.x)),
      y: points.map((point) => mean(point.y)),
      low: points.map(({ y }) => mean(y) - spread(y)),
      high: points.map(({ y }) => mean(y) + spread(y)),
    },
  ];
}
