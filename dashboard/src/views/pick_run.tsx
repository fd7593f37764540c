// A view of one run: which run that is, by the URL or else the newest that fits.
import type { ComponentChildren } from "preact";
import type { RunRow } from "../api";
import { label } from "../compare";
import { Empty, Head, Waiting } from "../parts";
import { useGet } from "../request";
import { ask, place } from "../route";

interface Properties {
  title: string;
  fits?: (run: RunRow) => boolean;
  /** What to say where no run fits. */
  none: string;
  children: (run: RunRow) => ComponentChildren;
}

export function OfRun({ title, fits = () => true, none, children }: Properties) {
  const runs = useGet<RunRow[]>("dashboard/runs", (happened) => happened.kind === "reset");
  return (
    <Waiting loaded={runs}>
      {(rows) => {
        const asked = place.value.query.get("run");
        const fitting = rows.filter((row) => fits(row) || row.run_id === asked);
        const run = fitting.find((row) => row.run_id === asked) ?? fitting[0];
        return (
          <section class="view">
            <Head title={title}>
              {run && (
                <label>
                  Run{" "}
                  <select value={run.run_id} onChange={(event) => ask({ run: event.currentTarget.value })}>
                    {fitting.map((row) => (
                      <option value={row.run_id} key={row.run_id}>
                        {row.seed === null ? label(row) : `${label(row)} · ${row.run_id}`}
                      </option>
                    ))}
                  </select>
                </label>
              )}
            </Head>
            {run ? children(run) : <Empty>{none}</Empty>}
          </section>
        );
      }}
    </Waiting>
  );
}
