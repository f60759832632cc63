-- KEEP: somebody still waits for a request that outlives its listeners; it is wanted for so long from now.
-- KEYS 1 state
-- ARGV 1 ms
-- Returns its status, or '' when there is no such request
local status = redis.call('HGET', KEYS[1], 'status')
if not status then return '' end
redis.call('HSET', KEYS[1], 'wanted_until_ms', now_ms() + tonumber(ARGV[1]))
return status
