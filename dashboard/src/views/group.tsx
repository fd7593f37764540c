// The rollouts of one task side by side, and the tree of what they share.
import type { CreditView, PrefixTree } from "../api";
import { count, number, oneLine, percent, plural, signed, visible } from "../format";
import { useKeys } from "../keys";
import { Balance, Empty, Facts, Head, rangeOf, Status, Tabs, Waiting } from "../parts";
import { useGet } from "../request";
import { go, href, place } from "../route";
import { type Column, Table } from "../table";
import { Reward } from "./rollouts";
import { Tree } from "./tree";

type Member = CreditView["members"][number];

export function Group({ groupId }: { groupId: string }) {
  const tree = place.value.path[2] === "tree";
  const path = `dashboard/groups/${encodeURIComponent(groupId)}`;
  const loaded = useGet<CreditView>(path, (happened) => happened.kind === "reset" || happened.group_id === groupId);
  const grown = useGet<PrefixTree>(tree ? `${path}/tree` : undefined);
  const run = loaded.data?.group?.run_id;
  useKeys({
    1: () => go(href(["groups", groupId])),
    2: () => go(href(["groups", groupId, "tree"])),
    u: () => go(href(["rollouts"], { run: run ?? undefined })),
  });
  return (
    <section class="view group">
      <p class="crumbs">
        <a href={href(["rollouts"])}>Rollouts</a>
        {run && (
          <>
            {" / "}
            <a href={href(["runs", run])}>{run}</a>
          </>
        )}
      </p>
      <Head title={`Group ${groupId}`} note={loaded.data && plural(loaded.data.members.length, "member")}>
        <a class="button" href={href(["rollouts"], { group: groupId })}>
          As a list
        </a>
      </Head>
      <Tabs
        label="Ways of looking at it"
        tabs={[
          ["Members", href(["groups", groupId])],
          ["Prefix tree", href(["groups", groupId, "tree"])],
        ]}
        now={tree ? "prefix tree" : "members"}
      />
      {tree ? (
        <Waiting loaded={grown}>{(one) => <Tree tree={one} members={loaded.data?.members ?? []} />}</Waiting>
      ) : (
        <Waiting loaded={loaded}>{(view) => <Members view={view} />}</Waiting>
      )}
    </section>
  );
}

function Members({ view }: { view: CreditView }) {
  if (view.members.length === 0) return <Empty>This group has no rollouts yet.</Empty>;
  const rewards = view.members.flatMap(({ row }) => (row.reward === null ? [] : [row.reward]));
  const mean = rewards.reduce((sum, one) => sum + one, 0) / rewards.length;
  const spread = Math.sqrt(rewards.reduce((sum, one) => sum + (one - mean) ** 2, 0) / rewards.length);
  return (
    <>
      <p class="input">{oneLine(view.members[0]?.row.rollout.input, 400)}</p>
      {view.problem && <p class="problem">{visible(view.problem)}</p>}
      <Facts
        facts={[
          ["Mean reward", rewards.length ? number(mean) : "–"],
          ["Spread", rewards.length ? number(spread) : "–"],
          ["Rewarded", percent(rewards.length / view.members.length)],
          ["Returns", view.credit.returns],
          ["Baseline", view.credit.baseline],
        ]}
      />
      <Table
        label="Members"
        rows={view.members}
        columns={columns(view)}
        id={(member) => member.row.rollout.rollout_id}
        href={(member) => href(["rollouts", member.row.rollout.rollout_id])}
      />
    </>
  );
}

function columns(view: CreditView): Column<Member>[] {
  const rewards = rangeOf(view.members.map((member) => member.row.reward));
  const most = Math.max(1e-9, ...view.members.map((member) => Math.abs(member.advantage ?? 0)));
  return [
    { name: "#", width: "44px", cell: ({ row }) => String(row.rollout.group_index ?? "") || "·" },
    { name: "Status", width: "104px", cell: ({ row }) => <Status value={row.rollout.status} /> },
    { name: "Reward", width: "70px", align: "end", cell: ({ row }) => <Reward value={row.reward} range={rewards} /> },
    { name: "Advantage", width: "80px", align: "end", cell: ({ advantage }) => signed(advantage) },
    { name: "Bar", width: "120px", cell: ({ advantage }) => <Balance value={advantage} most={most} /> },
    { name: "Calls", width: "52px", align: "end", cell: ({ calls }) => count(calls.length) },
    { name: "Sampled", width: "70px", align: "end", cell: ({ row }) => count(row.tokens_written) },
    {
      name: "Tools",
      width: "minmax(140px, 2fr)",
      cell: ({ calls }) =>
        calls.flatMap((call) =>
          call.tools.map((one, index) => (
            <span class={one.status > 0 ? "good" : "bad"} key={`${call.span_id} ${index}`}>
              {oneLine(one.tool, 30)} {one.status > 0 ? "✓" : "✗"}{" "}
            </span>
          )),
        ),
    },
  ];
}
