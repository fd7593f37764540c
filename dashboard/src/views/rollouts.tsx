// All rollouts, newest first, however many: found by what they are, page by page as they come into sight.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import type { RolloutList, RolloutRow, RunRow } from "../api";
import { label } from "../compare";
import { filterOf, MODES, STATUSES } from "../filters";
import { ago, count, duration, number, oneLine, plural, taskLine, visible } from "../format";
import { useLive } from "../live";
import { Empty, Failed, Head, rangeOf, shade, Status, Tag } from "../parts";
import { Refused, request, useGet } from "../request";
import { ask, href, place } from "../route";
import { type Column, Table } from "../table";

const PAGE = 100;

const columnsOf = (runs: Map<string, string>, range: [number, number] | undefined): Column<RolloutRow>[] => [
  {
    name: "Task",
    width: "minmax(150px, 4fr)",
    cell: ({ rollout }) => <span title={rollout.rollout_id}>{taskLine(rollout.input)}</span>,
  },
  {
    name: "Run",
    width: "minmax(80px, 1fr)",
    cell: ({ rollout: { run_id } }) =>
      run_id && (
        <a href={href(["runs", run_id])} title={run_id}>
          {visible(runs.get(run_id) ?? run_id)}
        </a>
      ),
  },
  {
    name: "Agent",
    width: "minmax(60px, 1fr)",
    cell: ({ agents }) => <span class="muted">{agents.map((agent) => oneLine(agent, 30)).join(", ")}</span>,
  },
  { name: "Step", width: "48px", align: "end", sort: "number", cell: ({ rollout }) => stepOf(rollout) },
  { name: "Reward", width: "60px", align: "end", sort: "reward", cell: (row) => <Reward value={row.reward} range={range} /> },
  { name: "Status", width: "96px", sort: "status", cell: ({ rollout }) => <Status value={rollout.status} /> },
  { name: "Mode", width: "48px", sort: "mode", cell: ({ rollout }) => rollout.mode },
  { name: "Calls", width: "48px", align: "end", cell: (row) => count(row.calls) },
  { name: "Tokens", width: "60px", align: "end", cell: (row) => count(row.tokens_read + row.tokens_written) },
  {
    name: "Error",
    width: "minmax(80px, 1fr)",
    sort: "error",
    cell: ({ error, attempts }) => (
      <>
        {error && <span class="error">{oneLine(error, 60)} </span>}
        {attempts > 1 && <Tag title="attempts">{plural(attempts, "attempt")}</Tag>}
      </>
    ),
  },
  {
    name: "Tags",
    title: "The label of its annotation, and its tags",
    width: "minmax(56px, 1fr)",
    cell: ({ rollout: { metadata } }) =>
      [metadata.annotation?.label, ...(metadata.tags ?? [])]
        .filter(Boolean)
        .map((tag: string) => <Tag key={tag}>{tag}</Tag>),
  },
  {
    name: "Group",
    width: "48px",
    cell: ({ rollout }) =>
      rollout.group_id && <a href={href(["groups", rollout.group_id])}>{`#${rollout.group_index ?? ""}`}</a>,
  },
  { name: "Took", width: "68px", align: "end", cell: ({ rollout }) => duration(took(rollout)) },
  { name: "Started", width: "84px", align: "end", sort: "start_time", cell: ({ rollout }) => ago(rollout.start_time) },
];

/** The step of training or evaluation that asked for it. */
function stepOf({ metadata }: RolloutRow["rollout"]): string {
  return String(metadata["step"] ?? /^train-(\d+)-/.exec(String(metadata["sample"]))?.[1] ?? "");
}

function took({ start_time, end_time }: RolloutRow["rollout"]): number {
  return (end_time ?? Date.now() / 1000) - start_time;
}

/** A reward, shaded by where it lies within the range of those beside it. */
export function Reward({ value, range }: { value: number | null; range: [number, number] | undefined }) {
  if (value === null) return <span class="muted">–</span>;
  return <span class={`reward ${shade(value, range)}`}>{number(value)}</span>;
}

export function Rollouts() {
  const { query } = place.value;
  const pages = usePages(query);
  const runs = useGet<RunRow[]>("dashboard/runs", (happened) => happened.kind === "reset");
  const names = new Map((runs.data ?? []).map((run) => [run.run_id, label(run)]));
  const range = rangeOf(pages.rows.map((row) => row.reward));
  const columns = columnsOf(names, range).filter((one) => one.name !== "Run" || !query.get("run"));
  return (
    <section class="view rollouts">
      <Head title="Rollouts" note={pages.total === null ? "" : plural(pages.total, "rollout")}>
        {pages.stale && (
          <button type="button" onClick={pages.reload}>
            Show what is new
          </button>
        )}
      </Head>
      <Filters />
      {pages.error ? (
        <Failed message={pages.error} again={pages.reload} />
      ) : pages.rows.length === 0 && pages.done ? (
        <Empty>No rollouts {query.size ? "match" : "yet"}.</Empty>
      ) : (
        <Table
          label="Rollouts"
          rows={pages.rows}
          columns={columns}
          id={(row) => row.rollout.rollout_id}
          href={(row) => href(["rollouts", row.rollout.rollout_id])}
          more={pages.done ? undefined : pages.more}
          total={pages.total ?? undefined}
          sorted={query.get("sort") ?? "-number"}
          sortBy={(sort) => ask({ sort })}
          onTop={pages.onTop}
        />
      )}
    </section>
  );
}

function Filters() {
  const { query } = place.value;
  const search = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  const typed = (name: string) => (event: { currentTarget: HTMLInputElement }) => {
    const { value } = event.currentTarget;
    clearTimeout(search.current);
    search.current = setTimeout(() => ask({ [name]: value }), 250);
  };
  const field = (name: string, hint: string) => ({
    placeholder: hint,
    "aria-label": hint,
    value: query.get(name) ?? "",
    onInput: typed(name),
  });
  const pick = (name: string, hint: string, options: string[]) => (
    <select
      aria-label={hint}
      value={query.get(name) ?? ""}
      onChange={(event) => ask({ [name]: event.currentTarget.value })}
    >
      <option value="">{hint}</option>
      {options.map((option) => (
        <option key={option}>{option}</option>
      ))}
    </select>
  );
  return (
    <div class="toolbar" role="search">
      <input type="search" {...field("q", "Search ids, inputs, errors")} />
      {pick("status", "Any status", STATUSES)}
      {pick("mode", "Any mode", MODES)}
      <input type="number" step="any" {...field("above", "Reward from")} />
      <input type="number" step="any" {...field("below", "Reward to")} />
      <input type="number" step="1" min="0" {...field("step", "Step")} />
      <input {...field("tag", "Tag")} />
      <input {...field("label", "Label")} />
      <label class="check">
        <input
          type="checkbox"
          checked={query.get("error") === "any"}
          onChange={(event) => ask({ error: event.currentTarget.checked ? "any" : undefined })}
        />
        with an error
      </label>
      {["run", "group"].map(
        (name) =>
          query.get(name) && (
            <button type="button" class="tag" key={name} onClick={() => ask({ [name]: undefined })}>
              {name} {visible(query.get(name) ?? "")} ✕
            </button>
          ),
      )}
      {query.size > 0 && (
        <button type="button" class="quiet" onClick={() => (location.hash = href(["rollouts"]))}>
          Clear
        </button>
      )}
    </div>
  );
}

interface Pages {
  rows: RolloutRow[];
  total: number | null;
  done: boolean;
  error: string | null;
}

const NOTHING: Pages = { rows: [], total: null, done: false, error: null };

/** The rows of as many pages as were asked for. While the table stands at its top, what is new comes in by itself;
 * further down it is only said that there is something, lest rows move under the reader's eyes. */
function usePages(query: URLSearchParams) {
  const [pages, setPages] = useState(NOTHING);
  const [stale, setStale] = useState(false);
  const cursor = useRef<string | undefined>(undefined);
  const under = useRef<AbortController | undefined>(undefined);
  const atTop = useRef(true);
  const key = query.toString();
  const sort = query.get("sort") ?? "-number";

  const fetchPage = useCallback(
    async (fresh: boolean) => {
      if (!fresh && under.current) return;
      under.current?.abort();
      const mine = (under.current = new AbortController());
      const body = {
        where: filterOf(query),
        order: [{ field: sort.replace("-", ""), descending: sort.startsWith("-") }],
        limit: PAGE,
        cursor: fresh ? undefined : cursor.current,
        with_total: fresh,
      };
      try {
        const page = await request<RolloutList>("POST", "dashboard/rollouts", body, mine.signal);
        cursor.current = page.next_cursor ?? undefined;
        setPages((before) => ({
          rows: fresh ? page.items : [...before.rows, ...page.items],
          total: fresh ? page.total : before.total,
          done: page.next_cursor === null,
          error: null,
        }));
        if (fresh) setStale(false);
      } catch (error) {
        if (mine.signal.aborted) return;
        if (!(error instanceof Refused)) throw error;
        setPages((before) => ({ ...before, error: error.message }));
      } finally {
        if (under.current === mine) under.current = undefined;
      }
    },
    [key],
  );
  const reload = useCallback(() => void fetchPage(true), [fetchPage]);
  const more = useCallback(() => void fetchPage(false), [fetchPage]);
  useEffect(() => {
    cursor.current = undefined;
    reload();
    return () => under.current?.abort();
  }, [reload]);
  useLive(
    (happened) => happened.kind !== "metrics",
    () => (atTop.current ? reload() : setStale(true)),
  );
  const onTop = useCallback((top: boolean) => {
    atTop.current = top;
  }, []);
  return { ...pages, stale, reload, more, onTop };
}
