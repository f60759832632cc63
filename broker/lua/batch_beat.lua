-- BATCH_BEAT: a runner takes a batch, or keeps it, and says how far it has come; with a lease of 0 ms it leaves.
-- KEYS 1 record  2 lease
-- ARGV 1 runner  2 lease ms  3... field, value
-- Returns {status, expires_at s, now ms}, status '' when there is no such batch and 'lost' when another runner has it
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] then return {'lost', 0, 0} end
local f = redis.call('HMGET', KEYS[1], 'status', 'expires_at')
if not f[1] then return {'', 0, 0} end
if ARGV[2] == '0' then redis.call('DEL', KEYS[2]) else redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2]) end
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return {f[1], tonumber(f[2]), now_ms()}
