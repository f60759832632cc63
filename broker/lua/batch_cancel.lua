-- BATCH_CANCEL: somebody wants a batch to end. One that no runner has begun ends here; else its runner delivers what
-- is finished and ends it.
-- KEYS 1 record  2 open batches  3 lease
-- ARGV 1 id
-- Returns the status it has now, '' when there is no such batch
local status = redis.call('HGET', KEYS[1], 'status')
if not status then return '' end
if status ~= 'validating' and status ~= 'in_progress' then return status end
local now_s = math.floor(now_ms() / 1000)
redis.call('HSET', KEYS[1], 'status', 'cancelling', 'cancelling_at', now_s)
if status == 'in_progress' or redis.call('EXISTS', KEYS[3]) == 1 then return 'cancelling' end
redis.call('HSET', KEYS[1], 'status', 'cancelled', 'cancelled_at', now_s)
redis.call('SREM', KEYS[2], ARGV[1])
return 'cancelled'
