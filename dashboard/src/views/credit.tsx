// How a reward came to the calls that earned it, and how it would have come with other settings. The server computes
// both, with what training uses.
import { useState } from "preact/hooks";
import type { CreditedCall, CreditMember, CreditSettings, CreditView } from "../api";
import { number, oneLine, signed } from "../format";
import { Balance, Choice, Facts, Waiting } from "../parts";
import { request, useLoaded } from "../request";
import { href } from "../route";

const BASELINES = ["none", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline"];
const DEFAULTS = { alpha: 0.2, gamma: 0.9, tool_weights: 1 };

export function Credit({ rolloutId }: { rolloutId: string }) {
  const [settings, setSettings] = useState<CreditSettings>();
  const key = `credit ${rolloutId} ${JSON.stringify(settings ?? null)}`;
  const loaded = useLoaded(key, (signal) =>
    request<CreditView>("POST", "dashboard/credit", { rollout_id: rolloutId, settings }, signal),
  );
  const [kept, setKept] = useState<CreditView>();
  if (loaded.data && loaded.data !== kept) setKept(loaded.data);
  // While a slider moves, what was there stays until the new values come.
  const shown = { ...loaded, data: loaded.data ?? (loaded.error ? undefined : kept) };
  return (
    <Waiting loaded={shown}>
      {(view) => <Shown view={view} rolloutId={rolloutId} settings={settings ?? view.settings} set={setSettings} />}
    </Waiting>
  );
}

interface Properties {
  view: CreditView;
  rolloutId: string;
  settings: CreditSettings;
  set: (settings: CreditSettings | undefined) => void;
}

function Shown({ view, rolloutId, settings, set }: Properties) {
  const own = view.members.find((member) => member.rollout_id === rolloutId);
  const values = view.members.flatMap((member) => member.calls.flatMap((call) => [call.return, call.advantage]));
  const most = Math.max(1e-9, ...values.map((value) => Math.abs(value ?? 0)));
  const trained = view.trained_with && JSON.stringify(view.trained_with) === JSON.stringify(settings);
  return (
    <div class="credit">
      <WhatIf view={view} settings={settings} set={set} />
      <p class="note">
        {trained ? "This is what the run trains with." : view.trained_with ? "This is a what-if: nothing changes." : ""}
      </p>
      {view.problem && <p class="problem">{view.problem}</p>}
      {own && (
        <>
          <Facts
            facts={[
              ["Reward", number(own.reward)],
              ...Object.entries(own.terms).map(([name, value]): [string, string] => [name, signed(value)]),
            ]}
          />
          <Calls calls={own.calls} most={most} rolloutId={rolloutId} />
        </>
      )}
      {view.members.length > 1 && <Members members={view.members} most={most} rolloutId={rolloutId} />}
    </div>
  );
}

function WhatIf({ view, settings, set }: Omit<Properties, "rolloutId">) {
  const takes = view.options[settings.returns] ?? [];
  const weights = settings.returns_options.tool_weights ?? DEFAULTS.tool_weights;
  const weightOf = (tool: string) => (typeof weights === "number" ? weights : (weights[tool] ?? 0));
  const option = (options: CreditSettings["returns_options"]) =>
    set({ ...settings, returns_options: { ...settings.returns_options, ...options } });
  const weigh = (tool: string, weight: number) =>
    option({ tool_weights: { ...Object.fromEntries(view.tools.map((one) => [one, weightOf(one)])), [tool]: weight } });
  return (
    <div class="toolbar what-if">
      <Choice
        label="Returns"
        options={Object.keys(view.options)}
        value={settings.returns}
        choose={(returns) => set({ ...settings, returns, returns_options: {} })}
      />
      <label>
        Baseline{" "}
        <select
          value={settings.baseline}
          onChange={(event) => set({ ...settings, baseline: event.currentTarget.value, baseline_options: {} })}
        >
          {[...new Set([...BASELINES, settings.baseline])].map((one) => (
            <option key={one}>{one}</option>
          ))}
        </select>
      </label>
      {takes.includes("gamma") && (
        <Slider
          name="γ"
          value={settings.returns_options.gamma ?? DEFAULTS.gamma}
          most={1}
          set={(gamma) => option({ gamma })}
        />
      )}
      {takes.includes("alpha") && (
        <Slider
          name="α"
          value={settings.returns_options.alpha ?? DEFAULTS.alpha}
          most={1}
          set={(alpha) => option({ alpha })}
        />
      )}
      {takes.includes("tool_weights") &&
        view.tools.map((tool) => (
          <Slider key={tool} name={oneLine(tool, 30)} value={weightOf(tool)} most={2} set={(one) => weigh(tool, one)} />
        ))}
      <button type="button" class="quiet" onClick={() => set(undefined)}>
        as trained
      </button>
    </div>
  );
}

function Slider(properties: { name: string; value: number; most: number; set: (value: number) => void }) {
  const { name, value, most, set } = properties;
  return (
    <label class="slider">
      {name}
      <input
        type="range"
        min="0"
        max={most}
        step="0.05"
        value={value}
        onInput={(event) => set(Number(event.currentTarget.value))}
      />
      <output>{value.toFixed(2)}</output>
    </label>
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
          <th aria-label="Advantage as a bar" />
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
      <caption>Beside it, the others of its group</caption>
      <thead>
        <tr>
          <th>Rollout</th>
          <th class="end">Reward</th>
          <th>Advantage of each call</th>
        </tr>
      </thead>
      <tbody>
        {members.map((member) => (
          <tr key={member.rollout_id} class={member.rollout_id === rolloutId ? "own" : ""}>
            <th scope="row">
              <a href={href(["rollouts", member.rollout_id, "credit"])}>{member.rollout_id}</a>
            </th>
            <td class="end">{number(member.reward)}</td>
            <td class="balances">
              {member.calls.map((call) => (
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
