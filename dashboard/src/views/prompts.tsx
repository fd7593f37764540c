// Prompts that were searched for: who came of whom, what changed, and how each scored.
import type { MeasuredPrompt, Prompts as Read, Score, TriedPrompt } from "../api";
import { number, plural, time } from "../format";
import { Code, Empty, Facts, Foreign, Tag, Waiting } from "../parts";
import { query, useGet } from "../request";
import { ask, href, place } from "../route";
import { useKeys } from "../keys";
import { OfRun } from "./pick_run";

const SEARCHES = /apo|gepa|prompt/;

export function Prompts() {
  return (
    <OfRun
      title="Prompts"
      fits={(run) => SEARCHES.test(run.kind)}
      none="No run has searched for prompts yet. The apo and gepa algorithms do."
    >
      {(run) => <OneRun runId={run.run_id} key={run.run_id} />}
    </OfRun>
  );
}

function OneRun({ runId }: { runId: string }) {
  const path = `dashboard/prompts${query({ run_id: runId })}`;
  const loaded = useGet<Read>(path, (happened) => happened.kind === "reset" || happened.run_id === runId);
  return <Waiting loaded={loaded}>{(read) => <Lineage read={read} />}</Waiting>;
}

function Lineage({ read }: { read: Read }) {
  const asked = place.value.query.get("candidate");
  const best = [...read.candidates].sort((one, other) => (other.score?.mean ?? -1e9) - (one.score?.mean ?? -1e9))[0];
  const shown = read.candidates.find((one) => one.name === asked) ?? best;
  const order = lineage(read.candidates);
  const move = (by: number) => {
    const now = order.findIndex(({ one }) => one === shown);
    const next = order[Math.max(0, Math.min(order.length - 1, now + by))];
    if (next) ask({ candidate: next.one.name });
  };
  useKeys({ j: () => move(1), k: () => move(-1) });
  if (!shown) return <Empty>This run has no candidates.</Empty>;
  const beam = read.rounds.at(-1)?.beam ?? [];
  return (
    <div class="lineage">
      <ol class="candidates" aria-label="Candidates">
        {order.map(({ one, depth }) => (
          <li key={one.name} style={{ paddingLeft: `${depth * 14}px` }}>
            <button type="button" aria-pressed={one === shown} onClick={() => ask({ candidate: one.name })}>
              <span>{one.name}</span>
              <span class="muted">round {one.round}</span>
              {one === best && <Tag>best</Tag>}
              {beam.includes(one.name) && <Tag>beam</Tag>}
              <strong>{number(one.score?.mean)}</strong>
            </button>
          </li>
        ))}
      </ol>
      <OneCandidate one={shown} read={read} />
    </div>
  );
}

/** Children under their parents, the older first. */
function lineage(candidates: TriedPrompt[]): { one: TriedPrompt; depth: number }[] {
  const names = new Set(candidates.map((one) => one.name));
  const below = (parent: string | null, depth: number): { one: TriedPrompt; depth: number }[] =>
    candidates
      .filter((one) => (one.parent !== null && names.has(one.parent) ? one.parent : null) === parent)
      .flatMap((one) => [{ one, depth }, ...below(one.name, depth + 1)]);
  return below(null, 0);
}

function OneCandidate({ one, read }: { one: TriedPrompt; read: Read }) {
  const scored = read.rounds.flatMap((round): [number, Score][] => {
    const score = round.scores[one.name];
    return score ? [[round.number, score]] : [];
  });
  const tasks = [...new Set(read.measured.map((each) => each.task))].sort((a, b) => a - b);
  const best = bestOn(read.measured, one.name);
  const parent = read.candidates.find((other) => other.name === one.parent);
  const rejected = read.rounds.map((round) => round.rejected[one.name]).find(Boolean);
  return (
    <article class="candidate" aria-label={`Candidate ${one.name}`}>
      <h2>{one.name}</h2>
      <Facts
        facts={[
          ["Score", number(one.score?.mean)],
          ["Tasks", one.score && plural(one.score.tasks, "task")],
          ["Failed", one.score?.failed ? String(one.score.failed) : null],
          ["Best on", best.size > 0 && `${best.size} of ${plural(tasks.length, "task")}`],
          ["Tokens a rollout", one.score && tokens(one, parent)],
          ["Too long", one.score?.overflows ? plural(one.score.overflows, "rollout") : null],
          ["Parent", one.parent],
          ["Changed", one.changed],
          ["Made", time(one.time)],
          [
            "Resources",
            <a key="resources" href={href(["resources"], { id: one.resources_id })}>
              {one.resources_id}
            </a>,
          ],
          ["Rejected", rejected],
        ]}
      />
      {one.critique && (
        <>
          <h3>What was criticised in its parent</h3>
          <pre class="prose">
            <Foreign text={one.critique} />
          </pre>
        </>
      )}
      {one.diff && (
        <>
          <h3>What changed</h3>
          <Diff text={one.diff} />
        </>
      )}
      {Object.entries(one.texts).map(([name, text]) => (
        <section key={name}>
          <h3>{name}</h3>
          <Code text={text} label={name} />
        </section>
      ))}
      <ByTask one={one} read={read} best={best} />
      {scored.length > 1 && (
        <>
          <h3>Scores by round</h3>
          <Facts
            facts={scored.map(([round, score]) => [`Round ${round}`, `${number(score.mean)} of ${score.tasks}`])}
          />
        </>
      )}
    </article>
  );
}

/** Its tokens beside its parent's. */
function tokens(one: TriedPrompt, parent: TriedPrompt | undefined) {
  const own = number(one.score?.tokens);
  return parent?.score ? `${own}, its parent's ${number(parent.score.tokens)}` : own;
}

/** The tasks on which no other candidate has a higher reward. */
function bestOn(measured: MeasuredPrompt[], name: string): Set<number> {
  const most = new Map<number, number>();
  for (const each of measured) most.set(each.task, Math.max(most.get(each.task) ?? -Infinity, each.reward ?? 0));
  const own = measured.filter((each) => each.candidate === name && (each.reward ?? 0) === most.get(each.task));
  return new Set(own.map((each) => each.task));
}

/** Its rollouts on the tasks that chose, beside those of its parent and the highest reward. */
function ByTask({ one, read, best }: { one: TriedPrompt; read: Read; best: Set<number> }) {
  const of = (name: string | null, task: number) =>
    read.measured.find((each) => each.candidate === name && each.task === task);
  const own = read.measured.filter((each) => each.candidate === one.name).sort((a, b) => a.task - b.task);
  if (!own.length) return null;
  const cell = (each: MeasuredPrompt | undefined) =>
    each && <a href={href(["rollouts", each.rollout_id])}>{each.reward === null ? "failed" : number(each.reward)}</a>;
  return (
    <>
      <h3>Rollouts by task</h3>
      <table class="by-task" aria-label="Rollouts by task">
        <thead>
          <tr>
            <th>Task</th>
            <th>This</th>
            <th>Its parent</th>
            <th />
          </tr>
        </thead>
        <tbody>
          {own.map((each) => (
            <tr key={each.rollout_id}>
              <td>{each.task}</td>
              <td>{cell(each)}</td>
              <td>{cell(of(one.parent, each.task))}</td>
              <td>{best.has(each.task) && <Tag>best</Tag>}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

function Diff({ text }: { text: string }) {
  const kinds: Record<string, string> = { "+": "added", "-": "removed", "@": "muted" };
  return (
    <pre class="diff">
      {text.split("\n").map((line, index) => (
        <span class={kinds[line[0] ?? ""] ?? ""} key={index}>
          <Foreign text={line} />
          {"\n"}
        </span>
      ))}
    </pre>
  );
}
