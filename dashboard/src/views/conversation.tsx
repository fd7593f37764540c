// What was said: the messages of each conversation of an attempt, what each call added, and which calls learn.
import type { ConversationView, RewardView, Rollout, RolloutView, StepView } from "../api";
import { duration, number, oneLine, plural, signed, time, visible } from "../format";
import { useKeys } from "../keys";
import { Empty, Foreign, Json, Tag } from "../parts";
import { href } from "../route";
import { TryAgain } from "./forks";

export interface Message {
  role: string;
  content: string | { type: string; text?: string }[] | null;
  tool_calls?: { id: string; function: { name: string; arguments: string } }[];
  name?: string;
}

export function ConversationTab({ view }: { view: RolloutView }) {
  useKeys({ j: () => step(1), k: () => step(-1) });
  const steps = new Map(view.steps.map((one) => [one.span_id, one]));
  if (view.conversations.length === 0 && view.rewards.length === 0) {
    return <Empty>No LLM calls were recorded. The timeline shows what there is.</Empty>;
  }
  return (
    <div class="conversations">
      {view.conversations.map((one, number) => (
        <OneConversation
          conversation={one}
          title={`${view.conversations.length > 1 ? `Conversation ${number + 1}` : "Conversation"}`}
          steps={steps}
          rollout={view.row.rollout}
          ofLast={view.shown === view.attempts.length}
          key={number}
        />
      ))}
      <Rewards rewards={view.rewards} />
    </div>
  );
}

/** Focus the next or the previous call. */
function step(by: number): void {
  const calls = [...document.querySelectorAll<HTMLElement>(".call")];
  const next = Math.max(0, Math.min(calls.length - 1, calls.indexOf(document.activeElement as HTMLElement) + by));
  calls[next]?.focus();
}

interface Properties {
  conversation: ConversationView;
  title: string;
  steps: Map<string, StepView>;
  rollout: Rollout;
  ofLast: boolean;
}

function OneConversation({ conversation, title, steps, rollout, ofLast }: Properties) {
  return (
    <section class="conversation" aria-label={title}>
      <h2>
        {title}
        {conversation.agent && <span class="muted"> · {oneLine(conversation.agent, 80)}</span>}
      </h2>
      {conversation.calls.map((call) => {
        const own = steps.get(call.span_id);
        return (
          <article class="call" tabIndex={-1} key={call.span_id}>
            {call.tools.length > 0 && (
              <details class="offered">
                <summary>{plural(call.tools.length, "tool")} offered</summary>
                <Json value={call.tools} label="the tools" />
              </details>
            )}
            {call.new_messages.map((message, index) => (
              <OneMessage message={message as Message} key={index} />
            ))}
            {call.answer && <OneMessage message={call.answer as Message} sampled />}
            <footer>
              <a href={href(["rollouts", rollout.rollout_id, "tokens"], { call: call.span_id })}>call {call.call_index}</a>
              {call.model && <span>{visible(call.model)}</span>}
              {own && <span>{duration(own.end_time - own.start_time)}</span>}
              {own?.time_to_first_token != null && <span>first token {duration(own.time_to_first_token)}</span>}
              {own?.tokens_read != null && (
                <span>
                  {number(own.tokens_read)} → {number(own.tokens_written)} tokens
                </span>
              )}
              {own?.finish_reason && <span>{own.finish_reason}</span>}
              {own?.reward != null && <span>reward {signed(own.reward)}</span>}
              {call.left_out && <Tag title="not trained">not trained: {call.left_out}</Tag>}
              {ofLast && !own?.failed && call.call_index !== null && rollout.end_time !== null && (
                <TryAgain rollout={rollout} at={call.call_index} />
              )}
            </footer>
          </article>
        );
      })}
    </section>
  );
}

export function OneMessage({ message, sampled }: { message: Message; sampled?: boolean }) {
  return (
    <div class={`message ${message.role} ${sampled ? "sampled" : ""}`}>
      <span class="role">{visible(message.name ?? message.role)}</span>
      <div class="said">
        <Content content={message.content} />
        {message.tool_calls?.map((call) => (
          <pre class="tool-call" key={call.id}>
            <b>{visible(call.function.name)}</b>
            <Foreign text={`(${call.function.arguments})`} />
          </pre>
        ))}
      </div>
    </div>
  );
}

function Content({ content }: { content: Message["content"] }) {
  if (content === null || content === "") return null;
  if (typeof content === "string") {
    return (
      <pre>
        <Foreign text={content} />
      </pre>
    );
  }
  return (
    <>
      {content.map((part, index) => (
        <pre key={index}>
          {typeof part.text === "string" ? <Foreign text={part.text} /> : <Tag>{oneLine(part, 120)}</Tag>}
        </pre>
      ))}
    </>
  );
}

function Rewards({ rewards }: { rewards: RewardView[] }) {
  if (rewards.length === 0) return null;
  return (
    <section class="rewards" aria-label="Rewards">
      <h2>Rewards</h2>
      {rewards.map((reward) => (
        <p key={reward.span_id}>
          {reward.dimensions.map((one) => (
            <span class="dimension" key={one.name}>
              {visible(one.name)} <strong>{signed(one.value)}</strong>
            </span>
          ))}
          <span class="muted">
            {reward.final ? "final" : "intermediate"}
            {reward.posted ? ", posted" : ""}
            {reward.by ? `, by ${reward.by}` : ""} · {time(reward.time)}
          </span>
          {reward.comment && <span class="comment">{visible(reward.comment)}</span>}
        </p>
      ))}
    </section>
  );
}
