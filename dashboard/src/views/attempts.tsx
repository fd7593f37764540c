// The tries at a rollout, what they wrote to their streams, and the rollout as the store has it.
import { useState } from "preact/hooks";
import type { Attempt, RolloutView } from "../api";
import { duration, time } from "../format";
import { Code, Empty, Facts, Json, Status } from "../parts";
import { useGet } from "../request";
import { href } from "../route";

export function Attempts({ view }: { view: RolloutView }) {
  if (view.attempts.length === 0) return <Empty>No worker has taken it yet.</Empty>;
  const id = view.row.rollout.rollout_id;
  return (
    <ol class="attempts">
      {view.attempts.map((attempt) => (
        <OneAttempt
          attempt={attempt}
          rolloutId={id}
          shown={attempt.sequence_id === view.shown}
          key={attempt.attempt_id}
        />
      ))}
    </ol>
  );
}

function OneAttempt({ attempt, rolloutId, shown }: { attempt: Attempt; rolloutId: string; shown: boolean }) {
  const number = String(attempt.sequence_id);
  return (
    <li class={shown ? "shown" : ""}>
      <h2>
        <a href={href(["rollouts", rolloutId, "conversation"], { attempt: number })}>Attempt {number}</a>
        <Status value={attempt.status} />
        {shown && <span class="muted">the tabs show this one</span>}
      </h2>
      <Facts
        facts={[
          ["Why it ended", attempt.metadata.reason],
          ["Worker", attempt.worker_id],
          ["Started", time(attempt.start_time)],
          ["Took", attempt.end_time === null ? "not ended" : duration(attempt.end_time - attempt.start_time)],
          ["Last heartbeat", time(attempt.last_heartbeat_time)],
          ["Held back", attempt.held_seconds ? duration(attempt.held_seconds) : null],
          ["Id", attempt.attempt_id],
        ]}
      />
    </li>
  );
}

export function Logs({ view }: { view: RolloutView }) {
  const logs = view.steps.filter((step) => step.kind === "log");
  if (logs.length === 0) return <Empty>The attempt wrote nothing to its streams, or they were not kept.</Empty>;
  return (
    <>
      {logs.map((log) => (
        <section key={log.span_id}>
          <h2>
            {log.name} <span class="muted">{time(log.start_time)}</span>
          </h2>
          <Code text={log.result ?? ""} label={log.name} />
        </section>
      ))}
    </>
  );
}

export function Raw({ view }: { view: RolloutView }) {
  const { rollout } = view.row;
  const [open, setOpen] = useState(false);
  const shown = view.attempts.find((attempt) => attempt.sequence_id === view.shown);
  const path = `rollouts/${encodeURIComponent(rollout.rollout_id)}/spans?attempt_id=${shown?.attempt_id ?? "latest"}`;
  const spans = useGet<unknown>(open ? path : undefined);
  return (
    <>
      <h2>Rollout</h2>
      <Json value={rollout} label="the rollout" />
      <h2>Attempts</h2>
      <Json value={view.attempts} label="the attempts" />
      <details class="block" onToggle={(event) => setOpen(event.currentTarget.open)}>
        <summary>Spans, with their token ids</summary>
        {spans.data !== undefined && <Json value={spans.data} label="the spans" />}
        {spans.error && <p role="alert">{spans.error.message}</p>}
      </details>
    </>
  );
}
