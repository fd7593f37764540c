// The labels of a chart's axes, and the range of its values. Pure.

const LEAST_SPAN = 1e-3; // of a value: what differs by less is drawn as one line
const NOISE = 1e-9; // a range below is that of rounding

/** The range that a chart shows of values from `low` to `high`, with room around them. What differs by a thousandth of
 * itself or by rounding alone does not fill the chart: `1.0000001` to `1.0000004` becomes `0.9995` to `1.0005`. */
export function shownRange(low: number, high: number): [low: number, high: number] {
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (size === 0) return [0, 1];
  if (size < NOISE) return [low < 0 ? -NOISE : 0, high > 0 ? NOISE : 0];
  const least = low === high ? size * 0.2 : size * LEAST_SPAN;
  const span = Math.max(high - low, least);
  const middle = (low + high) / 2;
  const room = high - low > least ? span * 0.05 : 0;
  const from = middle - span / 2 - room;
  return [low >= 0 && from < 0 ? 0 : from, middle + span / 2 + room];
}

/** Labels of ticks that are at least `step` apart, with as many digits as tell them apart: `1.0000`, `1.0005`. */
export function tickLabels(ticks: number[], step: number): string[] {
  const size = Math.max(...ticks.map(Math.abs));
  if (size >= 1e4) {
    const [unit, name] = size >= 1e6 ? [1e6, "M"] : [1e3, "k"];
    return ticks.map((tick) => (tick === 0 ? "0" : `${(tick / unit).toFixed(decimals(step / unit))}${name}`));
  }
  if (size > 0 && size < 1e-3) {
    const digits = Math.max(0, Math.floor(Math.log10(size)) - Math.floor(Math.log10(step) + 1e-9));
    return ticks.map((tick) => (tick === 0 ? "0" : tick.toExponential(digits)));
  }
  return ticks.map((tick) => tick.toFixed(decimals(step)));
}

/** Of 0.25 there are two, of 0.5 one, of 20 none. */
function decimals(step: number): number {
  for (let found = 0; found < 12; found += 1) {
    const scaled = step * 10 ** found;
    if (Math.round(scaled) > 0 && Math.abs(scaled - Math.round(scaled)) < 1e-6 * scaled) return found;
  }
  return 12;
}

/** 12345 → `12.3k`, 1234567 → `1.23M`: a tick of a logarithmic axis. */
export function short(value: number): string {
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  return size !== 0 && size < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(4)));
}
