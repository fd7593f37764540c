// Prompts that were searched for: who came of whom, what changed, and how each scored.
import type { TriedPrompt, Prompts as Read, PromptScore } from "../api";
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
  const scored = read.rounds.flatMap((round): [number, PromptScore][] => {
    const score = round.scores[one.name];
    return score ? [[round.number, score]] : [];
  });
  const rejected = read.rounds.map((round) => round.rejected[one.name]).find(Boolean);
  return (
    <article class="candidate" aria-label={`TriedPrompt ${one.name}`}>
      <h2>{one.name}</h2>
      <Facts
        facts={[
          ["PromptScore", number(one.score?.mean)],
          ["Tasks", one.score && plural(one.score.tasks, "task")],
          ["Failed", one.score?.failed ? String(one.score.failed) : null],
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
