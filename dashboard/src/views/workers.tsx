// Who runs the agents: heard when, busy with what, how fast.
import { useEffect, useRef, useState } from "preact/hooks";
import type { Worker } from "../api";
import { ago, number, plural } from "../format";
import { Bar, Empty, Head, Status, Waiting } from "../parts";
import { useGet } from "../request";
import { href } from "../route";
import { type Column, Table } from "../table";

const INTERVAL = 3000; // milliseconds: heartbeats are no events of the store

export function Workers() {
  const loaded = useGet<Worker[]>("workers", (happened) => happened.kind === "reset");
  useEvery(INTERVAL, loaded.reload);
  const pace = usePace(loaded.data);
  return (
    <section class="view">
      <Waiting loaded={loaded}>
        {(workers) => (
          <>
            <Head
              title="Workers"
              note={`${plural(workers.length, "worker")}, ${workers.filter((one) => LIVING.includes(statusOf(one))).length} at work`}
            />
            {workers.length === 0 ? (
              <Empty>
                <p>
                  No worker has taken a rollout yet. <code>agl train</code> starts its own; others join with{" "}
                  <code>agl runner</code>.
                </p>
              </Empty>
            ) : (
              <Table
                label="Workers"
                rows={workers}
                columns={columns(pace)}
                id={(one) => one.worker_id}
                href={(one) =>
                  one.current_rollout_id ? href(["rollouts", one.current_rollout_id]) : href(["workers"])
                }
              />
            )}
          </>
        )}
      </Waiting>
    </section>
  );
}

const LIVING = ["busy", "idle"];

/** Of a silent worker, whether it ended by itself or vanished with agents that it was running. */
function statusOf({ status, heartbeat_stats: { running, ended } }: Worker): string {
  if (status === "busy" || (status === "idle" && !ended)) return status;
  return ended || !running ? "ended" : "gone";
}

function columns(pace: Map<string, number>): Column<Worker>[] {
  return [
    { name: "Worker", width: "minmax(140px, 1.5fr)", cell: (one) => one.worker_id },
    { name: "Status", width: "90px", cell: (one) => <Status value={statusOf(one)} /> },
    { name: "Heard", width: "90px", align: "end", cell: (one) => ago(one.last_heartbeat_time) },
    {
      name: "At work",
      width: "130px",
      cell: ({ status, heartbeat_stats: { running, concurrency, ended } }) =>
        status !== "gone" &&
        !ended &&
        running !== undefined &&
        concurrency !== undefined && (
          <Bar share={running / concurrency}>
            {running} of {concurrency}
          </Bar>
        ),
    },
    { name: "Finished", width: "84px", align: "end", cell: (one) => number(one.heartbeat_stats.finished) },
    { name: "Per minute", width: "84px", align: "end", cell: (one) => number(pace.get(one.worker_id)) },
    { name: "Newest rollout", width: "minmax(120px, 2fr)", cell: (one) => one.current_rollout_id ?? "" },
  ];
}

export function useEvery(milliseconds: number, then: () => void): void {
  const latest = useRef(then);
  latest.current = then;
  useEffect(() => {
    const timer = setInterval(() => document.hidden || latest.current(), milliseconds);
    return () => clearInterval(timer);
  }, [milliseconds]);
}

/** Rollouts per minute of each worker since the view was opened. */
function usePace(workers: Worker[] | undefined): Map<string, number> {
  const first = useRef(new Map<string, { finished: number; time: number }>());
  const [pace, setPace] = useState(new Map<string, number>());
  useEffect(() => {
    const now = Date.now();
    const next = new Map<string, number>();
    for (const { worker_id, heartbeat_stats } of workers ?? []) {
      const { finished } = heartbeat_stats;
      if (finished === undefined) continue;
      const since = first.current.get(worker_id);
      if (since === undefined || since.finished > finished) first.current.set(worker_id, { finished, time: now });
      else if (now > since.time) next.set(worker_id, ((finished - since.finished) / (now - since.time)) * 60000);
    }
    setPace(next);
  }, [workers]);
  return pace;
}
