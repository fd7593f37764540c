// What the rollouts' view is asked for, as the URL says it, and as the store understands it. Pure.

export type Filter =
  | { op: "eq" | "ge" | "le" | "exists" | "contains"; field: string; value?: unknown }
  | { op: "and" | "or"; of: Filter[] };

export const STATUSES = ["queuing", "preparing", "running", "requeuing", "succeeded", "failed", "cancelled"];
export const MODES = ["train", "val", "test"];

/** `{q: "flight", status: "failed"}` → the store's filter; undefined where nothing is asked. */
export function filterOf(query: URLSearchParams): Filter | undefined {
  const parts: Filter[] = [];
  for (const [name, field] of [
    ["status", "status"],
    ["mode", "mode"],
    ["run", "run_id"],
    ["group", "group_id"],
    ["tag", "tag"],
    ["label", "metadata.annotation.label"],
  ] as const) {
    const value = query.get(name);
    if (value) parts.push({ op: "eq", field, value });
  }
  for (const [name, op] of [
    ["above", "ge"],
    ["below", "le"],
  ] as const) {
    const value = query.get(name);
    if (value && Number.isFinite(Number(value))) parts.push({ op, field: "reward", value: Number(value) });
  }
  const step = query.get("step");
  if (step && Number.isFinite(Number(step))) parts.push(ofStep(Number(step)));
  if (query.get("error") === "any") parts.push({ op: "exists", field: "error" });
  const text = query.get("q")?.trim();
  if (text) parts.push(searched(text));
  return parts.length > 1 ? { op: "and", of: parts } : parts[0];
}

/** What an evaluation after a step ran, and what training ran for it. */
function ofStep(step: number): Filter {
  const evaluated: Filter = { op: "eq", field: "metadata.step", value: step };
  return { op: "or", of: [evaluated, { op: "contains", field: "metadata.sample", value: `train-${step}-` }] };
}

function searched(text: string): Filter {
  if (/^(ro|run|rollout)-\S{12,}$/.test(text)) return { op: "eq", field: "rollout_id", value: text };
  const of = ["rollout_id", "input", "error"].map((field): Filter => ({ op: "contains", field, value: text }));
  return { op: "or", of };
}
