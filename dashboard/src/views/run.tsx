// One run: how it is going, what it was started with, and a hand on its calls.
import { useState } from "preact/hooks";
import type { Cause, ModelDescription, Progress, Row, Run, RunRow, TaskPair } from "../api";
import { count, duration, number, plural, taskLine, time, visible } from "../format";
import { Facts, Head, Json, Status, Waiting } from "../parts";
import { Refused, request, useGet } from "../request";
import { href } from "../route";
import { useKeys } from "../keys";
import { may } from "../session";
import { took } from "../compare";
import { Charts } from "./charts";

export function RunDetails({ run }: { run: RunRow }) {
  useKeys({ u: () => (location.hash = href(["runs"])) });
  return (
    <section class="view run">
      <Head title={run.name ?? run.run_id} note={run.kind}>
        <Status value={run.status} doubtful={run.failed > 0} />
        <Hold run={run} />
        <a class="button" href={href(["rollouts"], { run: run.run_id })}>
          Rollouts
        </a>
        <a class="button" href={href(["quality"], { run: run.run_id })}>
          Data quality
        </a>
      </Head>
      <Facts
        facts={[
          ["Step", run.total_steps ? `${count(run.steps)} of ${count(run.total_steps)}` : count(run.steps)],
          ["Reward", number(run.last["reward"])],
          ["Best validation", number(run.best_val)],
          ["Seed", run.seed === null ? null : String(run.seed)],
          ["Policy version", count(run.policy_version)],
          ["Failed rollouts", run.failed ? count(run.failed) : null],
          ["Started", time(run.start_time)],
          ["Took", duration(took(run))],
        ]}
      />
      <Advice run={run} />
      {run.failed > 0 && <Failures run={run} />}
      <Progressed run={run} />
      <Charts rows={[run]} />
      <Manifest runId={run.run_id} />
    </section>
  );
}

/** What is off with this run, and what to do about it. */
function Advice({ run }: { run: RunRow }) {
  const last = run.last;
  const advice: string[] = run.lost ? [run.lost] : [];
  const groups = Math.round((last["rollouts"] ?? 0) / Number(run.settings["algorithm.group_size"] || Infinity));
  const alike = last["groups_without_variance"] ?? 0;
  if (groups > 0 && alike > groups / 2) {
    const level = (last["reward"] ?? 0) > 0.5 ? "harder tasks" : "easier tasks, a finer reward";
    advice.push(
      `${count(alike)} of ${count(groups)} groups had no two different rewards at the last step: use ${level}, larger groups or dynamic sampling.`,
    );
  }
  if ((last["unrewarded"] ?? 0) > 0)
    advice.push(`${count(last["unrewarded"] ?? 0)} rollouts of the last step have no reward: see why under Failures, or return a reward always.`);
  if ((last["calls_excluded"] ?? 0) > 0)
    advice.push(`${count(last["calls_excluded"] ?? 0)} calls of the last step are not trained: see Data quality.`);
  if (run.status === "running" && run.failed > 0) advice.push(`${plural(run.failed, "rollout")} failed so far.`);
  if (advice.length === 0) return null;
  return (
    <ul class="advice" aria-label="Advice">
      {advice.map((one) => (
        <li key={one}>{one}</li>
      ))}
    </ul>
  );
}

/** Why the held-out reward moved: by tag, with tools and lengths, and what the first and the newest weights did. */
function Progressed({ run }: { run: RunRow }) {
  const [open, setOpen] = useState(false);
  const path = open ? `dashboard/runs/${encodeURIComponent(run.run_id)}/progress` : undefined;
  const found = useGet<Progress>(path);
  if (run.best_val === null) return null;
  return (
    <details class="block" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Why did the reward move? Held-out tasks by tag, tools and length; first and newest weights</summary>
      {open && (
        <Waiting loaded={found}>
          {(told) => (
            <>
              <Means title="Reward after step" steps={told.steps} rows={told.rewards} />
              <Means title="Per rollout" steps={told.steps} rows={told.behaviour} />
              <SideBySide tasks={told.tasks} />
            </>
          )}
        </Waiting>
      )}
    </details>
  );
}

function Means({ title, steps, rows }: { title: string; steps: number[]; rows: Row[] }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={title}>
      <table class="settings">
        <thead>
          <tr>
            <th scope="col">{title}</th>
            {steps.map((step) => (
              <th scope="col" key={step}>
                {step}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={row.name}>
              <th scope="row">{row.name}</th>
              {row.means.map((mean, index) => (
                <td key={steps[index]}>{number(mean)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** The same tasks with the first weights and the newest, the largest change first. */
function SideBySide({ tasks }: { tasks: TaskPair[] }) {
  if (tasks.length === 0) return null;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="First and newest weights">
      <table class="settings">
        <thead>
          <tr>
            <th scope="col">Task</th>
            <th scope="col">First weights</th>
            <th scope="col">Newest weights</th>
          </tr>
        </thead>
        <tbody>
          {tasks.map((pair) => (
            <tr key={pair.first_id}>
              <th scope="row">{taskLine(JSON.parse(pair.task), 90)}</th>
              <td>
                <a href={href(["rollouts", pair.first_id])}>{number(pair.before)}</a>
              </td>
              <td>
                <a href={href(["rollouts", pair.last_id])}>{number(pair.after)}</a>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Failed rollouts, by cause. */
function Failures({ run }: { run: RunRow }) {
  const found = useGet<Cause[]>(`dashboard/runs/${encodeURIComponent(run.run_id)}/failures`, (happened) =>
    ["reset", "rollout"].includes(happened.kind),
  );
  return (
    <details class="block" open>
      <summary>{plural(run.failed, "failed rollout")}, by cause</summary>
      <Waiting loaded={found}>
        {(causes) => (
          <ul class="causes">
            {causes.map((cause) => (
              <li key={cause.reason}>
                <strong>{count(cause.count)}×</strong> <code>{visible(cause.reason)}</code>{" "}
                {cause.rollout_ids.slice(0, 3).map((id) => (
                  <a key={id} href={href(["rollouts", id, "attempts"])}>
                    {id}
                  </a>
                ))}
              </li>
            ))}
          </ul>
        )}
      </Waiting>
    </details>
  );
}

function Manifest({ runId }: { runId: string }) {
  const [open, setOpen] = useState(false);
  const runs = useGet<Run[]>(open ? "runs" : undefined);
  const found = runs.data?.find((one) => one.run_id === runId);
  return (
    <details class="block" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Manifest: configuration, versions, data, hardware</summary>
      {found && <Json value={found.manifest} label="the manifest" />}
    </details>
  );
}

/** Pause and resume: the gateway holds the calls of the run's models. */
function Hold({ run }: { run: RunRow }) {
  const [problem, setProblem] = useState("");
  const able = may("admin") && run.models.length > 0 && run.status === "running";
  const models = useGet<ModelDescription[]>(able ? "models" : undefined);
  if (!able) return null;
  const own = models.data?.filter((model) => run.models.includes(model.name)) ?? [];
  const held = own.some((model) => model.paused);
  const turn = async () => {
    const body = held ? { holder: "dashboard" } : { seconds: 3600, holder: "dashboard" };
    try {
      const verb = held ? "release" : "hold";
      await Promise.all(run.models.map((name) => request("POST", `models/${encodeURIComponent(name)}/${verb}`, body)));
      setProblem("");
      models.reload();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      setProblem(error.message);
    }
  };
  return (
    <>
      {problem && <span role="alert">{problem}</span>}
      {held && (
        <span class="note">
          {plural(
            own.reduce((sum, one) => sum + one.waiting, 0),
            "call",
          )}{" "}
          waiting
        </span>
      )}
      <button type="button" onClick={() => void turn()} disabled={own.length === 0}>
        {held ? "Resume" : "Pause"}
      </button>
    </>
  );
}
