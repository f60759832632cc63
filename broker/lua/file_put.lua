-- FILE_PUT: a file's content is in its place; from here on it exists. Safe to run twice.
-- KEYS 1 record  2 files of its API key  3 when files expire
-- ARGV 1 id  2 record  3 TTL ms  4 expires s
-- Returns 1
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], now_ms(), ARGV[1])
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[2], ARGV[3]) end
drop_oldest_expired(KEYS[2], KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
return 1
