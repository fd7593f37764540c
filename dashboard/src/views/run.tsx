// One run: how it is going, why it ended, what it was started with, and a hand on its calls.
import { useState } from "preact/hooks";
import type { Cause, ModelDescription, Run, RunRow } from "../api";
import { took } from "../compare";
import { count, duration, number, plural, time, visible } from "../format";
import { useKeys } from "../keys";
import { Facts, Foreign, Head, Json, Status, Tag, Waiting } from "../parts";
import { Refused, request, useGet } from "../request";
import { href } from "../route";
import { may } from "../session";
import { Charts } from "./charts";
import { RunActions } from "./run_actions";
import { WhyMoved } from "./why";

export function RunDetails({ run }: { run: RunRow }) {
  useKeys({ u: () => (location.hash = href(["runs"])) });
  return (
    <section class="view run">
      <Head title={run.name ?? run.run_id} note={run.kind}>
        <Status value={run.status} doubtful={run.failed > 0} />
        <Hold run={run} />
        <RunActions run={run} />
        <a class="button" href={href(["rollouts"], { run: run.run_id })}>
          Rollouts
        </a>
        <a class="button" href={href(["quality"], { run: run.run_id })}>
          Data quality
        </a>
      </Head>
      <Ended run={run} />
      {run.status === "running" && <UnderWay run={run} />}
      <Facts
        facts={[
          ["Step", run.total_steps ? `${count(run.steps)} of ${count(run.total_steps)}` : count(run.steps)],
          ["Reward", number(run.last["reward"])],
          ["Best validation", number(run.best_val)],
          ["Seed", run.seed === null ? null : String(run.seed)],
          // The first version is published before the first step: of a run without a step it says nothing.
          ["Policy version", run.steps > 0 ? count(run.policy_version) : null],
          ["Agent", run.agent],
          ["Failed rollouts", run.failed ? count(run.failed) : null],
          ["Started", time(run.start_time)],
          ["Took", duration(took(run))],
          ["Ended because", run.status === "succeeded" ? run.reason : null],
          ["Tags", run.tags.length > 0 && run.tags.map((tag) => <Tag key={tag}>{tag}</Tag>)],
        ]}
      />
      <Advice run={run} />
      {run.failed > 0 && <Failures run={run} />}
      <WhyMoved run={run} />
      <Charts rows={[run]} />
      <Manifest runId={run.run_id} />
    </section>
  );
}

/** Why it ended, where it did not end well, and what to say of a training without success. */
function Ended({ run }: { run: RunRow }) {
  const why = [run.status !== "succeeded" && run.status !== "running" && run.reason, run.lost];
  return (
    <>
      {why.map(
        (text) =>
          text && (
            <p class="problem reason" role="alert" key={text}>
              <Foreign text={text} />
            </p>
          ),
      )}
      {run.conclusion && (
        <p class="conclusion" role="note">
          <Foreign text={run.conclusion} />
        </p>
      )}
    </>
  );
}

/** How far a running run is, and for how long it will go on. */
function UnderWay({ run }: { run: RunRow }) {
  if (!run.total_steps) return null;
  return (
    <p class="under-way">
      <progress max={run.total_steps} value={run.steps} aria-label="Steps done" />
      <span>
        {count(run.steps)} of {plural(run.total_steps, "step")}
        {run.time_left !== null && `, about ${duration(Math.round(run.time_left))} left`}
        {run.stopping && ", stops after this step"}
      </span>
    </p>
  );
}

/** What is off with this run, and what to do about it. */
function Advice({ run }: { run: RunRow }) {
  const last = run.last;
  const advice: string[] = run.excluded.map((sentence) => `In the newest step ${sentence}.`);
  const groups = Math.round((last["rollouts"] ?? 0) / Number(run.settings["algorithm.group_size"] || Infinity));
  const alike = last["groups_without_variance"] ?? 0;
  if (groups > 0 && alike > groups / 2) {
    const level = (last["reward"] ?? 0) > 0.5 ? "harder tasks" : "easier tasks, a finer reward";
    advice.push(
      `In ${count(alike)} of ${count(groups)} groups of the newest step all rollouts earned the same reward, so they trained nothing. Try ${level}, larger groups or dynamic sampling.`,
    );
  }
  if ((last["unrewarded"] ?? 0) > 0)
    advice.push(
      `${plural(last["unrewarded"] ?? 0, "rollout")} of the newest step returned no reward. Return one from every rollout; failed rollouts are listed by cause below.`,
    );
  if ((last["calls_excluded"] ?? 0) > 0 && run.excluded.length === 0)
    advice.push(
      `${plural(last["calls_excluded"] ?? 0, "call")} of the newest step did not train. Data quality lists the reasons.`,
    );
  if (run.status === "running" && run.failed > 0) advice.push(`${plural(run.failed, "rollout")} failed so far.`);
  if (advice.length === 0) return null;
  return (
    <ul class="advice" aria-label="Advice">
      {advice.map((one) => (
        <li key={one}>{visible(one)}</li>
      ))}
    </ul>
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
