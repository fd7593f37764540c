// What came of a rollout when it was run again from one of its calls: a branch for each call, beside what it earned itself.
import { useState } from "preact/hooks";
import type { Branch, Rollout, RolloutView } from "../api";
import { number, oneLine, plural, visible } from "../format";
import { Bar, Code, Empty, Status, Waiting } from "../parts";
import { Refused, request, useGet } from "../request";
import { go, href } from "../route";
import { may } from "../session";

export function Forks({ view }: { view: RolloutView }) {
  const path = `dashboard/rollouts/${encodeURIComponent(view.row.rollout.rollout_id)}/forks`;
  const loaded = useGet<Branch[]>(path, (happened) => ["reset", "rollout", "queued"].includes(happened.kind));
  return <Waiting loaded={loaded}>{(branches) => <Branches view={view} branches={branches} />}</Waiting>;
}

function Branches({ view, branches }: { view: RolloutView; branches: Branch[] }) {
  const { rollout, reward } = view.row;
  const rewards = branches.flatMap((branch) => branch.forks.map((fork) => fork.reward ?? 0));
  const most = Math.max(1, reward ?? 0, ...rewards);
  if (branches.length === 0) {
    return (
      <Empty>
        Nobody has forked this rollout. “Try again from here” below a call of the conversation does, and in a terminal:{" "}
        <code>agl fork {rollout.rollout_id} --at 0</code>
      </Empty>
    );
  }
  return (
    <div class="forks">
      <p>
        The rollout earned <strong>{number(reward)}</strong>. Forks have its calls up to theirs, and go on by themselves.
      </p>
      {branches.map((branch) => (
        <OneBranch branch={branch} most={most} key={branch.at} />
      ))}
    </div>
  );
}

function OneBranch({ branch, most }: { branch: Branch; most: number }) {
  const rewarded = branch.forks.filter((fork) => fork.reward !== null).length;
  return (
    <section class="branch" aria-label={`Forks at call ${branch.at}`}>
      <h2>
        From call {branch.at}
        <span class="muted">
          {" "}
          · {plural(branch.forks.length, "fork")} · mean reward {number(branch.mean_reward)} of {rewarded}
        </span>
      </h2>
      <table>
        <thead>
          <tr>
            <th>fork</th>
            <th>status</th>
            <th>reward</th>
            <th>what call {branch.at} answered, or what went wrong</th>
          </tr>
        </thead>
        <tbody>
          {branch.forks.map((fork) => (
            <tr key={fork.rollout_id}>
              <td>
                <a href={href(["rollouts", fork.rollout_id])}>{fork.rollout_id}</a>
              </td>
              <td>
                <Status value={fork.status} />
              </td>
              <td>
                <Bar share={Math.max(0, fork.reward ?? 0) / most}>{number(fork.reward)}</Bar>
              </td>
              <td>{oneLine(fork.answer ?? fork.error ?? "", 160)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

/** The form below a call that forks the rollout there. */
export function TryAgain({ rollout, at }: { rollout: Rollout; at: number }) {
  const [open, setOpen] = useState(false);
  const [samples, setSamples] = useState(4);
  const [answer, setAnswer] = useState("");
  const [problem, setProblem] = useState("");
  const enqueue = async () => {
    const { rollout_id, input, mode, resources_id, config, metadata } = rollout;
    const source = { rollout_id, at, ...(answer ? { answer } : {}) };
    const fork = { input, mode, resources_id, config, metadata, source };
    try {
      await request("POST", "rollouts", { requests: Array.from({ length: samples }, () => fork) });
      go(href(["rollouts", rollout_id, "forks"]));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      setProblem(error.message);
    }
  };
  return (
    <>
      <button type="button" class="link" aria-expanded={open} onClick={() => setOpen(!open)}>
        try again from here
      </button>
      {open && (
        <form
          class="popover"
          onSubmit={(event) => {
            event.preventDefault();
            void enqueue();
          }}
        >
          <p>In a terminal, with the agent and the newest weights of its run:</p>
          <Code text={`agl fork ${rollout.rollout_id} --at ${at}`} label="the command" />
          {may("trainer") && (
            <>
              <p>Or queued here, for the runners of this server:</p>
              <label>
                Forks
                <input
                  type="number"
                  min={1}
                  max={64}
                  value={samples}
                  onInput={(event) => setSamples(Number(event.currentTarget.value))}
                />
              </label>
              <label>
                Answer of call {at}; empty: sampled anew
                <textarea rows={3} value={answer} onInput={(event) => setAnswer(event.currentTarget.value)} />
              </label>
              {problem && (
                <p class="problem" role="alert">
                  {visible(problem)}
                </p>
              )}
              <button type="submit" class="main" disabled={!(samples >= 1 && samples <= 64)}>
                Queue {plural(samples, "fork")}
              </button>
            </>
          )}
        </form>
      )}
    </>
  );
}
