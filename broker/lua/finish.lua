-- FINISH: a worker ends a request, once.
-- KEYS 1 state  2 token log  3 logprobs  4 worker record  5 its rows  6 load  7 ended  8 rows by API key  9 live requests
-- ARGV 1 id  2 worker id  3 attempt  4 tokens the log must hold (-1: any)  5 status  6 cause  7 end message  8 wake channel
-- Returns {'ok'} | {'again'} (this attempt had already ended it) | {'lost'} | {'short', length}
if not is_owned(KEYS[1], ARGV[2], ARGV[3]) then
  local f = redis.call('HMGET', KEYS[1], 'attempt', 'end')
  if f[1] == ARGV[3] and f[2] == ARGV[7] then return {'again'} end
  return {'lost'}
end
local length, wanted = redis.call('STRLEN', KEYS[2]) / 4, tonumber(ARGV[4])
if wanted >= 0 and length ~= wanted then return {'short', length} end
release_row(KEYS[1], ARGV[1], KEYS[4], KEYS[5], KEYS[8])
end_request({state = KEYS[1], log = KEYS[2], lps = KEYS[3]}, {KEYS[6], KEYS[7], KEYS[9]}, ARGV[5], ARGV[6], ARGV[7])
redis.call('PUBLISH', ARGV[8], 'finish')
return {'ok'}
