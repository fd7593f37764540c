// One run: how it is going, what it was started with, and a hand on its calls.
import { useState } from "preact/hooks";
import type { ModelDescription, Run, RunRow } from "../api";
import { count, duration, number, plural, time } from "../format";
import { Facts, Head, Json, Status } from "../parts";
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
      <Head title={run.run_id} note={run.kind}>
        <Status value={run.status} />
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
          ["Started", time(run.start_time)],
          ["Took", duration(took(run))],
        ]}
      />
      <Charts rows={[run]} />
      <Manifest runId={run.run_id} />
    </section>
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
  const held = own.some((model) => model.held);
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
