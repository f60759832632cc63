-- BEAT: a daemon says that it lives, and how far it has come.
-- KEYS 1 record  2 its job stream  3 its rows  4 last seen  5 tokenizer files it serves (or any absent key)
-- ARGV 1 record TTL ms  2 model identity or ''  3 tokenizer TTL ms  4... field, value of what changed
-- Returns the new counter, or 0 when the record is gone or was declared dead: start over under a new id
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HEXISTS', KEYS[1], 'dead') == 1 then return 0 end
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[1]) end
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[4], ARGV[2], now_ms())
  redis.call('PEXPIRE', KEYS[5], ARGV[3])
end
return redis.call('HINCRBY', KEYS[1], 'beat', 1)
