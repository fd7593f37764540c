// Numbers, times and names as people read them. Everything here is a pure function.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Four significant digits, thousands grouped: 0.0001234 → `1.234e-4`, 12345.6 → `12,346`, 0.5 → `0.5`. */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1000) return grouped.format(value);
  if (size !== 0 && size < 0.001) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** With its sign: `+1`, `−0.5`, `0`. */
export function signed(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return value > 0 ? `+${number(value)}` : number(value).replace("-", "−");
}

export function count(value: number): string {
  return grouped.format(value);
}

export function percent(share: number | null | undefined): string {
  return share === null || share === undefined ? "–" : `${number(Math.round(share * 1000) / 10)} %`;
}

/** `plural(1, "rollout")` → `1 rollout`; 2 → `2 rollouts`. */
export function plural(amount: number, noun: string): string {
  return `${count(amount)} ${noun}${amount === 1 ? "" : "s"}`;
}

/** Seconds: 0.0123 → `12 ms`, 3.21 → `3.21 s`, 75 → `1:15`, 3700 → `1:01:40`. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${number(Math.round(seconds * 10000) / 10)} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.floor(seconds);
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const shown = parts[0] ? parts : parts.slice(1);
  return shown.map((part, place) => (place ? String(part).padStart(2, "0") : part)).join(":");
}

/** Seconds since the epoch as the viewer's clock shows them; the day only if it is not today. */
export function time(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  const at = new Date(seconds * 1000);
  const clock = at.toLocaleTimeString("en-GB");
  const today = at.toDateString() === new Date().toDateString();
  return today ? clock : `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock}`;
}

export function ago(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "never";
  const passed = Date.now() / 1000 - seconds;
  if (passed < 2) return "now";
  if (passed < 60) return `${Math.round(passed)} s ago`;
  if (passed < 3600) return `${Math.round(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} d ago`;
}

/** Any JSON on one line, for a cell of a table. */
export function oneLine(value: unknown, longest = 160): string {
  const text = typeof value === "string" ? value : (JSON.stringify(value) ?? "");
  const flat = visible(text.slice(0, longest * 2).replace(/\s+/g, " "));
  return flat.length > longest ? `${flat.slice(0, longest)}…` : flat;
}

/** What a task is about, on one line: of an object its longest text, which names, ids and labels are shorter than. */
export function taskLine(input: unknown, longest = 160): string {
  if (input === null || typeof input !== "object") return oneLine(input, longest);
  const texts = Object.values(input).filter((value) => typeof value === "string");
  return oneLine(texts.sort((one, other) => other.length - one.length)[0] ?? input, longest);
}

/** `visible` for text of several lines. */
export function visibleLines(text: string): string {
  return text.replace(/[^\n\t]+/g, visible);
}

/** What cannot be seen, made visible: control characters and escape codes as their pictures, `ESC` as `␛`, and what turns
    the direction of text by its number. */
export function visible(text: string): string {
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, (one) => {
    const code = one.charCodeAt(0);
    if (code > 0x7f) return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
    return one === "\u007f" ? "␡" : one === "\n" ? "⏎" : String.fromCharCode(0x2400 + code);
  });
}
