// A table of measurements side by side: tasks or tags against evaluations or runs, in colours, with what changed.
import { useState } from "preact/hooks";
import { number, signed, visible } from "../format";
import { rangeOf, shade } from "../parts";
import { href } from "../route";

export interface Measurements {
  title: string;
  /** Whether the values are rewards, which are coloured within the range that was seen. */
  rewards: boolean;
  rows: MeasuredRow[];
}

export interface MeasuredRow {
  key: string;
  name: string;
  values: (number | null)[];
  /** A rollout behind each value. */
  rollout_ids?: (string | null)[];
}

interface Properties {
  label: string;
  /** What the values of a row are of, such as the steps of evaluations. */
  columns: string[];
  /** What the last column compares. */
  change: string;
  parts: Measurements[];
}

/** The place of a column to sort by, `columns.length` being the change; in the order given without one. */
interface Sorting {
  place: number;
  descending: boolean;
}

export function Matrix({ label, columns, change, parts }: Properties) {
  const [sorting, setSorting] = useState<Sorting>();
  const rewards = parts.filter((part) => part.rewards).flatMap((part) => part.rows);
  const range = rangeOf(rewards.flatMap((row) => row.values));
  const sortBy = (place: number) =>
    setSorting({ place, descending: sorting?.place === place ? !sorting.descending : true });
  const head = (name: string, place: number, title?: string) => (
    <th
      scope="col"
      key={place}
      class="end"
      title={title}
      aria-sort={sorting?.place === place ? (sorting.descending ? "descending" : "ascending") : undefined}
    >
      <button type="button" class="quiet" onClick={() => sortBy(place)}>
        {name}
        {sorting?.place === place && (sorting.descending ? " ↓" : " ↑")}
      </button>
    </th>
  );
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={label}>
      <table class="matrix">
        {parts.map((part, place) => (
          <tbody key={part.title}>
            <tr>
              <th scope="col">{part.title}</th>
              {columns.map((name, column) => (place ? <td key={column} /> : head(visible(name), column)))}
              {place ? <td /> : head("Change", columns.length, change)}
            </tr>
            {sorted(part.rows, sorting).map((row) => (
              <tr key={row.key}>
                <th scope="row">{visible(row.name)}</th>
                {row.values.map((value, column) => (
                  <td key={column} class={`end ${part.rewards ? shade(value, range) : ""}`}>
                    <Value value={value} rollout={row.rollout_ids?.[column]} />
                  </td>
                ))}
                <td class={`end ${part.rewards ? direction(changeOf(row.values)) : ""}`}>
                  {signed(changeOf(row.values))}
                </td>
              </tr>
            ))}
          </tbody>
        ))}
      </table>
    </div>
  );
}

function Value({ value, rollout }: { value: number | null; rollout: string | null | undefined }) {
  return rollout ? <a href={href(["rollouts", rollout])}>{number(value)}</a> : <>{number(value)}</>;
}

/** From the first value that was measured to the last; null where there is one alone. */
function changeOf(values: (number | null)[]): number | null {
  const [first, ...later] = values.filter((value) => value !== null);
  const last = later.at(-1);
  return first === undefined || last === undefined ? null : last - first;
}

function direction(change: number | null): string {
  if (!change) return "muted";
  return change > 0 ? "good" : "bad";
}

/** Rows without a value come last. */
function sorted(rows: MeasuredRow[], sorting: Sorting | undefined): MeasuredRow[] {
  if (sorting === undefined) return rows;
  const by = ({ values }: MeasuredRow) => (sorting.place < values.length ? values[sorting.place] : changeOf(values));
  const sign = sorting.descending ? -1 : 1;
  return [...rows].sort((one, other) => {
    const [left, right] = [by(one) ?? null, by(other) ?? null];
    if (left === null || right === null) return Number(left === null) - Number(right === null);
    return sign * (left - right);
  });
}
