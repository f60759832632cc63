-- REGISTER: a daemon's record, with what it serves if it is a worker. Safe to run twice: free rows are set once.
-- KEYS 1 record  2 daemons  3 models  4 tokenizer files  5 last seen
-- ARGV 1 id  2 record TTL ms  3 free rows or ''  4 free cache slots or ''  5 model identity or ''  6 model card
--      7 tokenizer TTL ms  8 number of record fields; then field, value...; then file name, content...
-- Returns 1
local at = 9
redis.call('HSETNX', KEYS[1], 'beat', '0')
for _ = 1, tonumber(ARGV[8]) do
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
  at = at + 2
end
if ARGV[3] ~= '' then redis.call('HSETNX', KEYS[1], 'free', ARGV[3]) end
if ARGV[4] ~= '' then redis.call('HSETNX', KEYS[1], 'free_tokens', ARGV[4]) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
if ARGV[5] ~= '' then
  redis.call('HSET', KEYS[3], ARGV[5], ARGV[6])
  redis.call('HSET', KEYS[5], ARGV[5], now_ms()) -- it is served from now on, not only from its first heartbeat
end
while at < #ARGV do
  redis.call('HSET', KEYS[4], ARGV[at], ARGV[at + 1])
  at = at + 2
end
if ARGV[5] ~= '' then redis.call('PEXPIRE', KEYS[4], ARGV[7]) end
return 1
