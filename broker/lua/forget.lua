-- FORGET: of requests whose answers are safe elsewhere only a stub is left, for a while: who submits one of them late,
-- as a process does that was stopped in the middle of it, must not have it run again. One that has not ended stays.
-- KEYS per request: state, token log, logprobs
-- ARGV 1 TTL of a stub ms  2... ids
-- Returns how many went
local gone = 0
for i = 1, #KEYS, 3 do
  local id = ARGV[(i + 2) / 3 + 1]
  local f = redis.call('HMGET', KEYS[i], 'status', 'digest', 'ordinal', 'forgotten')
  if f[1] and f[1] ~= 'waiting' and f[1] ~= 'running' and not f[4] then
    redis.call('DEL', KEYS[i], KEYS[i + 1], KEYS[i + 2])
    redis.call('HSET', KEYS[i], 'status', f[1], 'digest', f[2], 'ordinal', f[3], 'forgotten', '1',
      'end', failed_event(id, 'forgotten', 'the answer was taken and its record given up'))
    redis.call('PEXPIRE', KEYS[i], ARGV[1])
    gone = gone + 1
  end
end
return gone
