// Why the held-out reward moved: the evaluations of one run, or the newest ones of several, task by task.
import { useState } from "preact/hooks";
import type { Progress, Row, RunRow, TaskRow } from "../api";
import { label } from "../compare";
import { taskLine } from "../format";
import { Empty, Waiting } from "../parts";
import { request, useGet, useLoaded } from "../request";
import { type MeasuredRow, Matrix } from "./matrix";

const READING = "Reading the held-out rollouts, their calls and tools …";

/** By tag, with tools and lengths, and task by task, after each evaluation of a run. */
export function WhyMoved({ run }: { run: RunRow }) {
  const [open, setOpen] = useState(false);
  const path = open ? `dashboard/runs/${encodeURIComponent(run.run_id)}/progress` : undefined;
  const found = useGet<Progress>(path);
  if (run.best_val === null) return null;
  return (
    <details class="block" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Why did the reward move? Held-out tasks by tag, tools and length, after each evaluation</summary>
      {open && (
        <Waiting loaded={found} doing={READING}>
          {(told) =>
            told.steps.length === 0 ? (
              <Empty>No evaluation has ended yet.</Empty>
            ) : (
              <Matrix
                label="Evaluations"
                columns={told.steps.map((step) => `step ${step}`)}
                change="From the first weights to the newest"
                parts={[
                  { title: "Reward", rewards: true, rows: told.rewards.map(meansOf) },
                  { title: "Per rollout", rewards: false, rows: told.behaviour.map(meansOf) },
                  { title: "Task", rewards: true, rows: told.tasks.map(taskOf) },
                ]}
              />
            )
          }
        </Waiting>
      )}
    </details>
  );
}

/** The newest evaluations of several runs, oldest run first. */
export function TasksOfRuns({ rows }: { rows: RunRow[] }) {
  const [open, setOpen] = useState(false);
  const ordered = [...rows].sort((one, other) => one.start_time - other.start_time);
  const body = { run_ids: ordered.map((row) => row.run_id) };
  const found = useLoaded(open ? JSON.stringify(body) : undefined, (signal) =>
    request<TaskRow[]>("POST", "dashboard/tasks", body, signal),
  );
  return (
    <details class="block" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Why do they differ? The newest evaluation of each run, task by task</summary>
      {open && (
        <Waiting loaded={found} doing={READING}>
          {(tasks) =>
            tasks.length === 0 ? (
              <Empty>None of these runs has evaluated held-out tasks.</Empty>
            ) : (
              <TaskMatrix runs={ordered} tasks={tasks} />
            )
          }
        </Waiting>
      )}
    </details>
  );
}

/** Runs that measured no task have no column. */
function TaskMatrix({ runs, tasks }: { runs: RunRow[]; tasks: TaskRow[] }) {
  const measured = runs.map((_, column) => tasks.some((task) => task.rewards[column] !== null));
  const those = <T,>(values: T[]) => values.filter((_, column) => measured[column]);
  const rows = tasks.map((task) => ({
    ...taskOf(task),
    values: those(task.rewards),
    rollout_ids: those(task.rollout_ids),
  }));
  return (
    <Matrix
      label="Tasks by run"
      columns={those(runs).map(label)}
      change="From the oldest run to the newest that measured the task"
      parts={[{ title: "Task", rewards: true, rows }]}
    />
  );
}

function meansOf(row: Row): MeasuredRow {
  return { key: row.name, name: row.name, values: row.means };
}

function taskOf(row: TaskRow): MeasuredRow {
  const name = taskLine(JSON.parse(row.task), 90);
  return { key: row.task, name, values: row.rewards, rollout_ids: row.rollout_ids };
}
