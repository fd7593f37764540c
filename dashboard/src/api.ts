// What the server says, as types; `scripts/page_types.py` writes them. Times are seconds since the epoch.

export interface Attempt {
  rollout_id: string;
  attempt_id: string;
  sequence_id: number;
  start_time: number;
  end_time: number | null;
  status: "cancelled" | "failed" | "preparing" | "running" | "succeeded" | "timeout" | "unresponsive";
  worker_id: string | null;
  last_heartbeat_time: number | null;
  held_seconds: number;
  metadata: Record<string, any>;
}

export interface Branch {
  at: number;
  mean_reward: number | null;
  forks: ForkView[];
}

export interface Break {
  agent: string | null;
  call_index: number;
  earlier: number;
  position: number;
  inside: "answer" | "prompt";
  kind: "edited history" | "retokenised" | "tools changed" | "unknown";
  before: number[];
  recorded: number[];
  found: number[];
}

export interface CallView {
  span_id: string;
  call_index: number | null;
  model: string | null;
  new_messages: Record<string, any>[];
  answer: Record<string, any>;
  tools: Record<string, any>[];
  left_out: string | null;
}

export interface Cause {
  reason: string;
  count: number;
  rollout_ids: string[];
}

export interface Contents {
  resources: boolean;
  workers: boolean;
}

export interface ConversationView {
  agent: string | null;
  calls: CallView[];
}

export interface CreditMember {
  row: RolloutRow;
  advantage: number | null;
  terms: Record<string, number>;
  calls: CreditedCall[];
}

export interface CreditSettings {
  returns: string;
  returns_options: Record<string, any>;
  baseline: string;
  baseline_options: Record<string, any>;
  equal_rewards: boolean;
}

export interface CreditView {
  group: Group | null;
  credit: CreditSettings;
  problem: string | null;
  members: CreditMember[];
}

export interface CreditedCall {
  span_id: string;
  call_index: number;
  agent: string | null;
  prompt_tokens: number;
  sampled_tokens: number;
  given: number | null;
  tools: Record<string, any>[];
  return: number | null;
  advantage: number | null;
}

export interface ExplainedBreak {
  found: Break;
  suggestion: string;
  before: string[] | null;
  recorded: string[] | null;
  anew: string[] | null;
}

export interface ForkSource {
  rollout_id: string;
  at: number;
  attempt_id: string | null;
  answer: string | null;
  on_divergence: "fail" | "live";
  replace: ("dates" | "durations" | "folders" | "uuids")[];
}

export interface ForkView {
  rollout_id: string;
  status: string;
  reward: number | null;
  answer: string | null;
  error: string | null;
}

export interface Gap {
  start_time: number;
  end_time: number;
}

export interface Group {
  group_id: string;
  run_id: string | null;
  size: number;
  rollout_ids: string[];
  finished_index: number | null;
  source_id: string | null;
}

export interface LLM {
  resource_type: "llm";
  endpoint: string;
  model: string;
  api_key: string | null;
  sampling_parameters: Record<string, any>;
  gateway: boolean;
}

export interface MeasuredPrompt {
  candidate: string;
  task: number;
  rollout_id: string;
  reward: number | null;
}

export interface ModelDescription {
  name: string;
  aliases: string[];
  owner: string | null;
  trainable: boolean;
  train: Sampling | null;
  val: Sampling | null;
  replicas: ReplicaDescription[];
  held: boolean;
  paused: boolean;
  running: number;
  waiting: number;
  policy_version: number | null;
}

export interface PrefixTree {
  tokens: number;
  shared: number;
  nodes: TreeNode[];
}

export interface Progress {
  steps: number[];
  rewards: Row[];
  behaviour: Row[];
  tasks: TaskRow[];
}

export interface PromptCandidate {
  resource_type: "prompts";
  components: Record<string, PromptText>;
}

export interface PromptTemplate {
  resource_type: "prompt_template";
  template: string;
  engine: "f-string" | "jinja" | "poml";
}

export interface PromptText {
  place: string;
  sent: string;
  text: string;
}

export interface PromptTokens {
  ids: number[];
  texts: string[] | null;
  shared: number;
}

export interface Prompts {
  candidates: TriedPrompt[];
  rounds: Round[];
  measured: MeasuredPrompt[];
}

export interface Quality {
  run_id: string;
  rollouts: number;
  calls: number;
  step: number[];
  counts: Record<string, Record<string, number>>;
  shares: Record<string, (number | null)[]>;
  suggestions: Record<string, string>;
}

export interface ReplicaDescription {
  base_url: string;
  kind: string;
  healthy: boolean;
  running: number;
  ejected_since: number | null;
  why: string | null;
}

export interface ResourcesUpdate {
  resources_id: string;
  resources: Record<string, LLM | PromptTemplate | PromptCandidate>;
  version: number;
  create_time: number;
  run_id: string | null;
  parent_id: string | null;
  metadata: Record<string, any>;
}

export interface RewardView {
  span_id: string;
  time: number;
  final: boolean;
  posted: boolean;
  by: string | null;
  comment: string | null;
  dimensions: Record<string, any>[];
}

export interface Rollout {
  rollout_id: string;
  input: any;
  start_time: number;
  end_time: number | null;
  status: "cancelled" | "failed" | "preparing" | "queuing" | "requeuing" | "running" | "succeeded";
  priority: number;
  mode: "test" | "train" | "val";
  resources_id: string | null;
  run_id: string | null;
  group_id: string | null;
  group_index: number | null;
  config: RolloutConfig;
  metadata: Record<string, any>;
  source: ForkSource | null;
  reward: number | null;
  error: string | null;
}

export interface RolloutConfig {
  timeout_seconds: number | null;
  unresponsive_seconds: number | null;
  max_attempts: number;
  retry_condition: ("cancelled" | "failed" | "preparing" | "running" | "succeeded" | "timeout" | "unresponsive")[];
  retry: "replay" | "rerun";
  tools: "recorded" | "run";
}

export interface RolloutList {
  items: RolloutRow[];
  total: number | null;
  next_cursor: string | null;
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

export interface RolloutView {
  row: RolloutRow;
  attempts: Attempt[];
  shown: number | null;
  timeline: Timeline | null;
  steps: StepView[];
  conversations: ConversationView[];
  rewards: RewardView[];
  traceback: string | null;
}

export interface Round {
  number: number;
  beam: string[];
  scores: Record<string, Score>;
  rejected: Record<string, string>;
  final: boolean;
}

export interface Row {
  name: string;
  means: (number | null)[];
}

export interface Run {
  run_id: string;
  kind: string;
  start_time: number;
  status: "cancelled" | "failed" | "running" | "succeeded" | "stopped";
  end_time: number | null;
  policy_version: number;
  manifest: Record<string, any>;
}

export interface RunRow {
  run_id: string;
  name: string | null;
  tags: string[];
  agent: string | null;
  reason: string | null;
  conclusion: string | null;
  excluded: string[];
  time_left: number | null;
  stopping: boolean;
  failed: number;
  settings: Record<string, string>;
  kind: string;
  status: "cancelled" | "failed" | "running" | "succeeded" | "stopped";
  lost: string | null;
  start_time: number;
  end_time: number | null;
  policy_version: number;
  seed: number | null;
  family: string;
  steps: number;
  total_steps: number | null;
  models: string[];
  last: Record<string, number>;
  best_val: number | null;
  sparkline: number[];
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

export interface SampledTokens {
  ids: number[];
  texts: string[] | null;
  logprobs: number[];
  versions: number[];
  advantages: number[] | null;
}

export interface Sampling {
  temperature: number | null;
  top_p: number | null;
  top_k: number | null;
  max_tokens: number | null;
  stop: string[];
  seed: number | null;
  n: number;
}

export interface Score {
  mean: number;
  tasks: number;
  failed: number;
  tokens: number;
  overflows: number;
}

export interface Session {
  name: string;
  admin: boolean;
  scopes: ("admin" | "grader" | "read" | "trainer" | "worker")[];
  protected: boolean;
  reading: boolean;
  gateway: boolean;
  version: string;
}

export interface StepView {
  span_id: string;
  parent: number | null;
  depth: number;
  kind: string;
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
}

export interface TaskRow {
  task: string;
  rewards: (number | null)[];
  rollout_ids: (string | null)[];
}

export interface Timeline {
  start: number;
  end: number;
  gaps: Gap[];
  stood: string | null;
  last_span: string | null;
}

export interface TokenCall {
  span_id: string;
  call_index: number;
  agent: string | null;
  prompt_tokens: number;
  sampled_tokens: number;
}

export interface TokenView {
  span_id: string;
  calls: TokenCall[];
  tokenizer: string | null;
  prompt: PromptTokens;
  sampled: SampledTokens;
  break: ExplainedBreak | null;
}

export interface TreeNode {
  parent: number | null;
  tokens: number;
  sampled: number;
  depth: number;
  text: string | null;
  rollouts: string[];
  value: number | null;
  ends: Record<string, any>[];
}

export interface TriedPrompt {
  name: string;
  round: number;
  texts: Record<string, string>;
  parent: string | null;
  changed: string | null;
  critique: string | null;
  copied: string | null;
  diff: string;
  resources_id: string;
  time: number;
  score: Score | null;
}

export interface Worker {
  worker_id: string;
  status: "busy" | "gone" | "idle";
  last_heartbeat_time: number | null;
  current_rollout_id: string | null;
  current_attempt_id: string | null;
  heartbeat_stats: Record<string, any>;
}
