-- FORGET: records of requests whose answers are safe elsewhere go before their time. One that has not ended stays.
-- KEYS per request: state, token log, logprobs
-- Returns how many went
local gone = 0
for i = 1, #KEYS, 3 do
  local status = redis.call('HGET', KEYS[i], 'status')
  if status and status ~= 'waiting' and status ~= 'running' then
    redis.call('DEL', KEYS[i], KEYS[i + 1], KEYS[i + 2])
    gone = gone + 1
  end
end
return gone
