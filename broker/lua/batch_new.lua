-- BATCH_NEW: a batch begins. Safe to run twice.
-- KEYS 1 record  2 batches of its API key  3 open batches
-- ARGV 1 id  2 TTL ms  3 completion window s  4... field, value
-- Returns 1, or 0 when it was there before
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local now = now_ms()
local created_s = math.floor(now / 1000)
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'status', 'validating', 'created_at', created_s,
  'expires_at', created_s + tonumber(ARGV[3]))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
redis.call('SADD', KEYS[3], ARGV[1])
drop_oldest_expired(KEYS[2], KEYS[1], ARGV[1])
return 1
