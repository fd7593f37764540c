// What of the data reached training, and why the rest did not.
import type { Quality as Read } from "../api";
import { Chart } from "../chart";
import { count, percent } from "../format";
import { Bar, Empty, Facts, Waiting } from "../parts";
import { query, useGet } from "../request";
import { href } from "../route";
import { SERIES } from "../theme";
import { openStep } from "./charts";
import { OfRun } from "./pick_run";

const COUNTS: [key: string, title: string, meaning: string, of?: "rollouts" | "calls"][] = [
  ["outcomes", "Outcomes", "How rollouts ended, as training counts them", "rollouts"],
  ["excluded", "Calls excluded", "Why calls were not trained", "calls"],
  ["kept", "Calls kept, marked", "What was noted of calls that were trained", "calls"],
  ["breaks", "Prefixes broken, by kind", "Calls whose prompt should continue an earlier call and does not", "calls"],
  ["rewards_lost", "Rewards lost", "Rewards that count for nothing, and why"],
  ["dropped", "Groups dropped", "Why whole groups did not train"],
];

export function Quality() {
  return (
    <OfRun title="Data quality" none="No runs yet: there is no data to judge.">
      {(run) => <OneRun runId={run.run_id} key={run.run_id} />}
    </OfRun>
  );
}

function OneRun({ runId }: { runId: string }) {
  const path = `dashboard/quality${query({ run_id: runId })}`;
  const loaded = useGet<Read>(path, (happened) => happened.kind === "reset" || happened.run_id === runId);
  return (
    <Waiting loaded={loaded}>
      {(read) => (
        <>
          <Facts
            facts={[
              ["Rollouts", <a href={href(["rollouts"], { run: runId })}>{count(read.rollouts)}</a>],
              ["Calls", count(read.calls)],
            ]}
          />
          <div class="grid">
            {Object.entries(read.shares).map(([name, shares], index) => (
              <Chart
                key={name}
                title={`${name}, share per step`}
                lines={[
                  {
                    name,
                    color: SERIES[index % SERIES.length] ?? "--accent",
                    x: read.step,
                    y: shares,
                    run_id: runId,
                    step: read.step,
                  },
                ]}
                smoothing={0}
                log={false}
                x="step"
                open={openStep(name)}
              />
            ))}
          </div>
          <div class="counts">
            {COUNTS.map(([key, title, meaning, of]) => (
              <Counts key={key} title={title} meaning={meaning} counts={read.counts[key] ?? {}} read={read} of={of} />
            ))}
          </div>
        </>
      )}
    </Waiting>
  );
}

interface Properties {
  title: string;
  meaning: string;
  counts: Record<string, number>;
  read: Read;
  /** What the shares are of; without it none are shown, as what is counted has no whole. */
  of: "rollouts" | "calls" | undefined;
}

function Counts({ title, meaning, counts, read, of }: Properties) {
  const found = Object.entries(counts).sort(([, one], [, other]) => other - one);
  const most = Math.max(...found.map(([, amount]) => amount));
  const whole = of && read[of];
  return (
    <section class="count" aria-label={title}>
      <h2>{title}</h2>
      <p class="note">
        {meaning}
        {of && `, and their share of all ${of}`}.
      </p>
      {found.length === 0 && <Empty>None.</Empty>}
      <dl>
        {found.map(([name, amount]) => (
          <div key={name}>
            <dt>
              {name}
              {read.suggestions[name] && <small>{read.suggestions[name]}</small>}
            </dt>
            <dd>
              <Bar share={amount / (whole || most)}>{count(amount)}</Bar>
              {whole ? <span class="muted share">{percent(amount / whole)}</span> : null}
            </dd>
          </div>
        ))}
      </dl>
    </section>
  );
}
