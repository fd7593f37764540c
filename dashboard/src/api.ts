// What the server says, as types. Times are seconds since the epoch; `docs/dashboard.md` names the routes.

export interface Session {
  name: string;
  admin: boolean;
  scopes: ("read" | "worker" | "grader" | "trainer" | "admin")[];
  protected: boolean;
  version: string;
}

export type RunStatus = "running" | "succeeded" | "failed" | "cancelled";

export interface RunRow {
  run_id: string;
  kind: string;
  status: RunStatus;
  start_time: number;
  end_time: number | null;
  policy_version: number;
  seed: number | null;
  /** Runs of one family differ in their seed alone. */
  family: string;
  steps: number;
  total_steps: number | null;
  models: string[];
  last: Record<string, number>;
  best_val: number | null;
  sparkline: number[];
}

export interface Run {
  run_id: string;
  manifest: Record<string, unknown>;
}

export interface RunSeries {
  run_id: string;
  family: string;
  seed: number | null;
  names: string[];
  step: number[];
  seconds: number[];
  rollouts: number[];
  tokens_read: number[];
  tokens_written: number[];
  values: Record<string, (number | null)[]>;
}

export type Filter =
  | { op: "eq" | "ne" | "in" | "contains" | "lt" | "le" | "gt" | "ge" | "exists"; field: string; value?: unknown }
  | { op: "and" | "or" | "not"; of: Filter[] };

export interface Rollout {
  rollout_id: string;
  input: unknown;
  start_time: number;
  end_time: number | null;
  status: "queuing" | "preparing" | "running" | "requeuing" | "succeeded" | "failed" | "cancelled";
  priority: number;
  mode: "train" | "val" | "test";
  resources_id: string | null;
  run_id: string | null;
  group_id: string | null;
  group_index: number | null;
  config: Record<string, unknown>;
  metadata: { tags?: string[]; [key: string]: unknown };
}

export interface RolloutRow {
  rollout: Rollout;
  reward: number | null;
  error: string | null;
  calls: number;
  tokens_read: number;
  tokens_written: number;
  agents: string[];
  attempts: number;
}

export interface RolloutList {
  items: RolloutRow[];
  total: number | null;
  next_cursor: string | null;
}

export interface CreditedCall {
  span_id: string;
  call_index: number;
  agent: string | null;
  prompt_tokens: number;
  sampled_tokens: number;
  given: number | null;
  tools: { tool: string; status: 1 | -1; duration: number | null }[];
  return: number | null;
  advantage: number | null;
}

export interface CreditSettings {
  returns: string;
  returns_options: { alpha?: number; gamma?: number; tool_weights?: number | Record<string, number> };
  baseline: string;
  equal_rewards?: boolean;
  baseline_options: Record<string, unknown>;
}

export interface GroupView {
  group: { group_id: string; run_id: string | null; size: number; finished_index: number | null };
  credit: CreditSettings;
  problem: string | null;
  members: { row: RolloutRow; advantage: number | null; calls: CreditedCall[] }[];
}

export interface TreeNode {
  parent: number | null;
  tokens: number;
  sampled: number;
  depth: number;
  text: string | null;
  rollouts: string[];
  value: number | null;
  ends: { rollout_id: string; call_index: number }[];
}

export interface PrefixTree {
  tokens: number;
  shared: number;
  nodes: TreeNode[];
}

export interface Attempt {
  attempt_id: string;
  sequence_id: number;
  start_time: number;
  end_time: number | null;
  status: string;
  worker_id: string | null;
  last_heartbeat_time: number | null;
  held_seconds: number;
  metadata: { reason?: string; [key: string]: unknown };
}

export interface StepView {
  span_id: string;
  parent: number | null;
  depth: number;
  kind: "call" | "tool" | "agent" | "reward" | "error" | "other";
  name: string;
  agent: string | null;
  start_time: number;
  end_time: number;
  failed: boolean;
  problem: string | null;
  arguments: string | null;
  result: string | null;
  tokens_read: number | null;
  tokens_written: number | null;
  finish_reason: string | null;
  reward: number | null;
  time_to_first_token: number | null;
  call_index: number | null;
  replayable: boolean;
}

/** An LLM call as it can be asked again. */
export interface ReplayRequest {
  path: string;
  body: unknown;
}

export interface Message {
  role: string;
  content: string | { type: string; text?: string; [key: string]: unknown }[] | null;
  tool_calls?: { id: string; type: string; function: { name: string; arguments: string } }[];
  tool_call_id?: string;
  name?: string;
}

export interface Conversation {
  agent: string | null;
  calls: {
    span_id: string;
    call_index: number | null;
    model: string | null;
    new_messages: Message[];
    answer: Message | null;
    tools: unknown[];
    left_out: string | null;
  }[];
}

export interface RewardView {
  span_id: string;
  time: number;
  final: boolean;
  posted: boolean;
  by: string | null;
  comment: string | null;
  dimensions: { name: string; value: number }[];
}

export interface ExplainedBreak {
  found: {
    agent: string | null;
    call_index: number;
    earlier: number;
    position: number;
    inside: string;
    kind: string;
    before: number[];
    recorded: number[];
    found: number[];
  };
  suggestion: string;
  before: string[] | null;
  recorded: string[] | null;
  anew: string[] | null;
}

export interface RolloutView {
  row: RolloutRow;
  attempts: Attempt[];
  shown: number | null;
  steps: StepView[];
  conversations: Conversation[];
  logs: { stream: string; text: string; time: number }[];
  rewards: RewardView[];
}

export interface TokenView {
  span_id: string;
  calls: {
    span_id: string;
    call_index: number;
    agent: string | null;
    prompt_tokens: number;
    sampled_tokens: number;
  }[];
  tokenizer: string | null;
  prompt: { ids: number[]; texts: string[] | null; shared: number };
  sampled: {
    ids: number[];
    texts: string[] | null;
    logprobs: number[];
    versions: number[];
    advantages: number[] | null;
  };
  left_out: string | null;
  break: ExplainedBreak | null;
}

export interface CreditMember {
  rollout_id: string;
  reward: number | null;
  terms: Record<string, number>;
  calls: CreditedCall[];
}

export interface CreditView {
  settings: CreditSettings;
  trained_with: CreditSettings | null;
  options: Record<string, string[]>;
  tools: string[];
  problem: string | null;
  members: CreditMember[];
}

export interface Quality {
  run_id: string;
  measured: boolean;
  rollouts: number;
  calls: number;
  step: number[];
  counts: Record<"outcomes" | "excluded" | "kept" | "breaks" | "rewards_lost" | "dropped", Record<string, number>>;
  shares: Record<string, (number | null)[]>;
  suggestions: Record<string, string>;
}

export interface Score {
  mean: number;
  tasks: number;
  failed: number;
}

export interface Candidate {
  name: string;
  round: number;
  texts: Record<string, string>;
  parent: string | null;
  changed: string | null;
  critique: string | null;
  diff: string;
  resources_id: string;
  time: number;
  score: Score | null;
}

export interface Prompts {
  candidates: Candidate[];
  rounds: {
    number: number;
    beam: string[];
    scores: Record<string, Score>;
    rejected: Record<string, string>;
    final: boolean;
  }[];
}

export type Resource =
  | { resource_type: "llm"; endpoint: string; model: string; sampling_parameters: Record<string, unknown> }
  | { resource_type: "prompt_template"; template: string; engine: string };

export interface ResourcesUpdate {
  resources_id: string;
  resources: Record<string, Resource>;
  version: number;
  create_time: number;
  run_id: string | null;
  parent_id: string | null;
  metadata: Record<string, unknown>;
}

export interface Worker {
  worker_id: string;
  status: "idle" | "busy" | "gone";
  last_heartbeat_time: number | null;
  current_rollout_id: string | null;
  current_attempt_id: string | null;
  heartbeat_stats: { running?: number; finished?: number; concurrency?: number };
}

export interface Model {
  name: string;
  aliases: string[];
  owner: string | null;
  trainable: boolean;
  train: Record<string, unknown> | null;
  val: Record<string, unknown> | null;
  replicas: {
    base_url: string;
    kind: string;
    healthy: boolean;
    running: number;
    ejected_since: number | null;
    why: string | null;
  }[];
  held: boolean;
  running: number;
  waiting: number;
  policy_version: number | null;
}
