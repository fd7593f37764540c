// The prompts and answers of a group over their tokens: what several share is there once, where they part it branches.
import type { CreditView, PrefixTree, TreeNode } from "../api";
import { count, number, oneLine, percent, plural } from "../format";
import { Empty, Facts, rangeOf } from "../parts";
import { href } from "../route";

export function Tree({ tree, members }: { tree: PrefixTree; members: CreditView["members"] }) {
  if (tree.nodes.length === 0) return <Empty>No call of this group has token ids.</Empty>;
  const places = new Map(members.map(({ row }) => [row.rollout.rollout_id, row.rollout.group_index]));
  const values = tree.nodes.flatMap((node) => (node.value === null ? [] : [node.value]));
  const range = rangeOf(values) ?? [0, Math.max(1e-9, ...values)];
  return (
    <div class="tree">
      <Facts
        facts={[
          ["Tokens laid end to end", count(tree.tokens)],
          ["Computed once each", count(tree.tokens - tree.shared)],
          ["Saved", percent(tree.tokens ? tree.shared / tree.tokens : 0)],
          ["Branches", count(tree.nodes.length)],
        ]}
      />
      <p class="note">
        Each line is a run of tokens, with its continuations below. The colour and the number are the mean reward of the
        rollouts that pass through.
      </p>
      <ol class="nodes">
        {ordered(tree).map(({ index, ...drawn }) => (
          <Node {...drawn} range={range} places={places} key={index} />
        ))}
      </ol>
    </div>
  );
}

/** `only`: nothing else follows what it follows. */
interface Drawn {
  node: TreeNode;
  level: number;
  index: number;
  only: boolean;
}

/** Depth first, the most visited branch first; a level counts branchings, so that chains do not move to the right. */
function ordered({ nodes }: PrefixTree): Drawn[] {
  const below = new Map<number | null, number[]>();
  nodes.forEach((node, index) => below.set(node.parent, [...(below.get(node.parent) ?? []), index]));
  const drawn: Drawn[] = [];
  const waiting = (below.get(null) ?? []).map((index) => ({ index, level: 0, only: false })).reverse();
  for (let next = waiting.pop(); next; next = waiting.pop()) {
    const node = nodes[next.index];
    if (!node) continue;
    drawn.push({ node, ...next });
    const children = (below.get(next.index) ?? []).sort(
      (one, other) => (nodes[one]?.rollouts.length ?? 0) - (nodes[other]?.rollouts.length ?? 0),
    );
    const only = children.length === 1;
    for (const index of children) waiting.push({ index, level: next.level + (only ? 0 : 1), only });
  }
  return drawn;
}

interface Properties {
  node: TreeNode;
  level: number;
  only: boolean;
  range: [number, number];
  places: Map<string, number | null>;
}

function Node({ node, level, only, range: [low, high], places }: Properties) {
  const share = node.value === null ? 0 : (node.value - low) / (high - low);
  const color = `color-mix(in oklab, var(--accent) ${Math.round(15 + share * 85)}%, var(--raised))`;
  return (
    <li
      class={`node ${node.sampled ? "sampled" : "given"} ${only ? "only" : ""}`}
      style={{ paddingLeft: `${level * 18}px` }}
    >
      <span class="value" style={{ borderColor: node.value === null ? "transparent" : color }}>
        {number(node.value)}
      </span>
      <span class="through" title={`${plural(node.rollouts.length, "rollout")} pass through`}>
        ×{node.rollouts.length}
      </span>
      <span class="size">
        {count(node.tokens)}
        {node.sampled > 0 && <span class="muted"> · {count(node.sampled)} sampled</span>}
      </span>
      <span class="text">
        {only && <span class="muted">↳ </span>}
        {node.text === null ? "" : oneLine(node.text, 200)}
      </span>
      <span class="ends">
        {node.ends.slice(0, 8).map((end) => (
          <a
            href={href(["rollouts", end.rollout_id])}
            key={`${end.rollout_id} ${end.call_index}`}
            title={`${end.rollout_id}, call ${end.call_index}`}
          >
            #{places.get(end.rollout_id) ?? "?"}.{end.call_index}
          </a>
        ))}
        {node.ends.length > 8 && <span class="muted">+{node.ends.length - 8}</span>}
      </span>
    </li>
  );
}
