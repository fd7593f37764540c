// A table of any length of which only the rows in sight exist, walked through with j and k. It does not know what its
// rows mean.
import {
  elementScroll,
  observeElementOffset,
  observeElementRect,
  Virtualizer,
  type VirtualizerOptions,
} from "@tanstack/virtual-core";
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useReducer, useRef, useState } from "preact/hooks";
import { useKeys } from "./keys";

export interface Column<Row> {
  name: string;
  /** Where two columns have one name, what tells them apart. */
  id?: string;
  /** A track of a CSS grid: `120px`, `minmax(120px, 2fr)`. */
  width: string;
  cell: (row: Row) => ComponentChildren;
  /** Numbers end where they end, texts begin where they begin. */
  align?: "end";
  title?: string;
  /** What the rows are sorted by at a click on the column's name. */
  sort?: string;
}

interface Properties<Row> {
  label: string;
  rows: Row[];
  columns: Column<Row>[];
  id: (row: Row) => string;
  href?: (row: Row) => string;
  /** Called when the last of `rows` comes into sight and there may be more. */
  more?: (() => void) | undefined;
  total?: number | undefined;
  selected?: (row: Row) => boolean;
  /** What the rows are sorted by, such as `reward`, or `-reward` with the largest first. */
  sorted?: string | undefined;
  sortBy?: (sorted: string) => void;
  /** Told whether the table stands at its top. */
  onTop?: (top: boolean) => void;
}

const ROW_HEIGHT = 30; // pixels; `.row` in style/tables.css has the same
const GAP = 12; // pixels between columns and beside them, as there

export function Table<Row>(properties: Properties<Row>) {
  const { label, rows, columns, id, href, more, total, selected, sorted = "", sortBy, onTop } = properties;
  const scroller = useRef<HTMLDivElement>(null);
  const [active, setActive] = useState(-1);
  const virtual = useVirtual(rows.length, scroller);
  const shown = virtual.getVirtualItems();
  const last = shown.at(-1)?.index ?? -1;
  useEffect(() => {
    if (more && rows.length > 0 && last >= rows.length - 20) more();
  }, [last, rows.length, more]);
  const move = (by: number) => {
    const next = Math.max(0, Math.min(rows.length - 1, active + by));
    setActive(next);
    virtual.scrollToIndex(next);
  };
  const top = (virtual.scrollOffset ?? 0) < ROW_HEIGHT;
  useEffect(() => onTop?.(top), [top, onTop]);
  useKeys({ j: () => move(1), k: () => move(-1) });
  const refocus = useRef(-1);
  useLayoutEffect(() => {
    // Rows are made as they come into sight: the one to be focused may only now be there.
    if (active < 0 || refocus.current === active) return;
    const row = scroller.current?.querySelector<HTMLElement>(`[data-row="${active}"] a`);
    if (row) {
      row.focus({ preventScroll: true });
      refocus.current = active;
    }
  });
  const tracks = columns.map((column) => column.width).join(" ");
  const least = columns.reduce(
    (sum, column) => sum + Number.parseInt(/\d+/.exec(column.width)?.[0] ?? "0", 10) + GAP,
    GAP,
  );
  return (
    <div
      class="table"
      role="table"
      aria-label={label}
      aria-rowcount={(total ?? rows.length) + 1}
      tabIndex={0}
      ref={scroller}
    >
      <div
        class="sized"
        role="rowgroup"
        style={{ height: `${virtual.getTotalSize() + ROW_HEIGHT}px`, minWidth: `${least}px` }}
      >
        <div class="row head" role="row" style={{ gridTemplateColumns: tracks }}>
          {columns.map((column) => (
            <span
              role="columnheader"
              class={column.align}
              title={column.title}
              key={column.id ?? column.name}
              aria-sort={sorting(column.sort, sorted)}
            >
              {column.sort && sortBy ? (
                <button type="button" onClick={() => sortBy(sorted === `-${column.sort}` ? `${column.sort}` : `-${column.sort}`)}>
                  {column.name}
                  {ARROWS[sorting(column.sort, sorted) ?? ""]}
                </button>
              ) : (
                column.name
              )}
            </span>
          ))}
        </div>
        {shown.map(({ index, start }) => {
          const row = rows[index];
          if (row === undefined) return null;
          const style = { gridTemplateColumns: tracks, transform: `translateY(${start}px)` };
          const state = `${index === active ? "active" : ""} ${selected?.(row) ? "selected" : ""}`;
          return (
            <div
              class={`row ${state}`}
              role="row"
              aria-rowindex={index + 2}
              data-row={index}
              style={style}
              key={id(row)}
              onClick={(event) => href && follow(event, href(row))}
            >
              {columns.map((column, place) => (
                <span role="cell" class={column.align} key={column.id ?? column.name}>
                  {place === 0 && href ? <a href={href(row)}>{column.cell(row)}</a> : column.cell(row)}
                </span>
              ))}
            </div>
          );
        })}
      </div>
    </div>
  );
}

const ARROWS: Record<string, string> = { ascending: " ↑", descending: " ↓" };

function sorting(field: string | undefined, sorted: string): "ascending" | "descending" | undefined {
  if (!field || sorted.replace("-", "") !== field) return undefined;
  return sorted.startsWith("-") ? "descending" : "ascending";
}

/** A click anywhere in a row is a click on its link, unless it was on something of its own or selected text. */
function follow(event: MouseEvent, target: string): void {
  if ((event.target as Element).closest("a, button, input, label") || getSelection()?.toString()) return;
  location.hash = target;
}

function useVirtual(rows: number, scroller: { current: HTMLDivElement | null }) {
  const [, redraw] = useReducer((drawn: number) => drawn + 1, 0);
  const options: VirtualizerOptions<HTMLDivElement, HTMLDivElement> = {
    count: rows,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW_HEIGHT,
    overscan: 12,
    scrollPaddingStart: ROW_HEIGHT,
    observeElementRect,
    observeElementOffset,
    scrollToFn: elementScroll,
    onChange: () => redraw(0),
  };
  const [virtual] = useState(() => new Virtualizer(options));
  virtual.setOptions(options);
  useLayoutEffect(() => virtual._didMount(), [virtual]);
  useLayoutEffect(() => virtual._willUpdate());
  return virtual;
}
