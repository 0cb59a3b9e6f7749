"""The classes that plug into stock vLLM 0.32 by command-line options. See docs/architecture.md.

--scheduler-cls rose.executor.vllm.serving.ServingScheduler   (AsyncServingScheduler on GPUs)
--scheduler-cls rose.executor.vllm.rollout.RolloutScheduler
--worker-cls    rose.executor.vllm.worker.ElasticWorker
--additional-config '{"rose": {...}}'                         (fields: `options`)
"""
