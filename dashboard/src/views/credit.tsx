// How a reward came to the calls that earned it. The server computes it with what training uses.
import type { CreditedCall, CreditMember, CreditView } from "../api";
import { number, oneLine, signed, visible } from "../format";
import { Balance, Facts, Waiting } from "../parts";
import { useGet } from "../request";
import { href } from "../route";

export function Credit({ rolloutId }: { rolloutId: string }) {
  const loaded = useGet<CreditView>(`dashboard/rollouts/${encodeURIComponent(rolloutId)}/credit`);
  return <Waiting loaded={loaded}>{(view) => <Shown view={view} rolloutId={rolloutId} />}</Waiting>;
}

function Shown({ view, rolloutId }: { view: CreditView; rolloutId: string }) {
  const own = view.members.find((member) => member.row.rollout.rollout_id === rolloutId);
  const values = view.members.flatMap((member) => member.calls.flatMap((call) => [call.return, call.advantage]));
  const most = Math.max(1e-9, ...values.map((value) => Math.abs(value ?? 0)));
  return (
    <div class="credit">
      {view.problem && <p class={own && own.row.rollout.mode !== "train" ? "note" : "problem"}>{visible(view.problem)}</p>}
      <Facts
        facts={[
          ["Returns", view.credit.returns],
          ["Baseline", view.credit.baseline],
          ["Reward", number(own?.row.reward)],
          ...Object.entries(own?.terms ?? {}).map(([name, value]): [string, string] => [name, signed(value)]),
        ]}
      />
      {own && <Calls calls={own.calls} most={most} rolloutId={rolloutId} />}
      {view.members.length > 1 && <Members members={view.members} most={most} rolloutId={rolloutId} />}
    </div>
  );
}

function Calls({ calls, most, rolloutId }: { calls: CreditedCall[]; most: number; rolloutId: string }) {
  return (
    <table class="plain">
      <caption>Credit of each call</caption>
      <thead>
        <tr>
          <th>Call</th>
          <th>Tools</th>
          <th class="end">Given</th>
          <th class="end">Return</th>
          <th class="end">Advantage</th>
          <th>Bar</th>
          <th class="end">Tokens</th>
        </tr>
      </thead>
      <tbody>
        {calls.map((call) => (
          <tr key={call.span_id}>
            <th scope="row">
              <a href={href(["rollouts", rolloutId, "tokens"], { call: call.span_id, color: "advantage" })}>
                {call.call_index}
              </a>{" "}
              <span class="muted">{call.agent && oneLine(call.agent, 30)}</span>
            </th>
            <td>
              {call.tools.map((one, index) => (
                <span class={one.status > 0 ? "good" : "bad"} key={index}>
                  {oneLine(one.tool, 30)} {one.status > 0 ? "✓" : "✗"}{" "}
                </span>
              ))}
            </td>
            <td class="end">{signed(call.given)}</td>
            <td class="end">{signed(call.return)}</td>
            <td class="end">{signed(call.advantage)}</td>
            <td>
              <Balance value={call.advantage} most={most} />
            </td>
            <td class="end">{number(call.sampled_tokens)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Members({ members, most, rolloutId }: { members: CreditMember[]; most: number; rolloutId: string }) {
  return (
    <table class="plain">
      <caption>All rollouts of its group</caption>
      <thead>
        <tr>
          <th>Rollout</th>
          <th class="end">Reward</th>
          <th>Advantage of each call</th>
        </tr>
      </thead>
      <tbody>
        {members.map(({ row, calls }) => (
          <tr key={row.rollout.rollout_id} class={row.rollout.rollout_id === rolloutId ? "own" : ""}>
            <th scope="row">
              <a href={href(["rollouts", row.rollout.rollout_id, "credit"])}>{row.rollout.rollout_id}</a>
            </th>
            <td class="end">{number(row.reward)}</td>
            <td class="balances">
              {calls.map((call) => (
                <span key={call.span_id} title={`call ${call.call_index}: ${signed(call.advantage)}`}>
                  <Balance value={call.advantage} most={most} />
                  {signed(call.advantage)}
                </span>
              ))}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
