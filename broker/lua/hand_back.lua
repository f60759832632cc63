-- HAND_BACK: requests of a worker that will not go on with them return to the line, before all that is newer.
-- KEYS 1 worker record  2 its rows  3 waiting returned  4 load  5 ended  6 rows by API key  7 dead letters
--      8 live requests  9... per request: state, token log, logprobs
-- ARGV 1 worker id  2 '1' if the owner died, else '0'  3 crashes at which a request is given up  4 dead letters kept
--      5 wake channel  6... per request: id, attempt
-- Returns {id, outcome, ...}, outcome 'waiting', 'ended', 'dead' or 'lost'
local out, totals = {}, {KEYS[4], KEYS[5], KEYS[8]}
local CLEARED_BY = 8 -- tokens after which a row has proven itself; one that outlived its owner is no suspect any more

local function give_up(req, id, crashes)
  local event = failed_event(id, 'crashed_workers', 'the request was given up after ' .. crashes .. ' workers died with it')
  local f = redis.call('HMGET', req.state, 'ticket', 'body')
  redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[4], '*', 'id', id, 'why', 'crashes', 'ticket', f[1], 'body', f[2])
  end_request(req, totals, 'failed', 'crashed_workers', event)
  return 'dead'
end

local function queue_again(req, id, crashes)
  local f = redis.call('HMGET', req.state, 'ordinal', 'ticket', 'accepted_ms', 'deadline_ms', 'priority', 'cost')
  local length = redis.call('STRLEN', req.log) / 4
  redis.call('HSET', req.state, 'unproven_below', length + CLEARED_BY)
  if ARGV[2] == '1' then redis.call('HSET', req.state, 'suspect_below', length + CLEARED_BY) end
  local entry = redis.call('XADD', KEYS[3], '*', 'id', id, 'ordinal', f[1], 'ticket', f[2], 'accepted_ms', f[3],
    'deadline_ms', f[4], 'crashes', crashes, 'committed', length,
    'priority', f[5], 'cost', f[6])
  redis.call('HSET', req.state, 'status', 'waiting', 'entry', entry, 'stream', KEYS[3])
  redis.call('HDEL', req.state, 'owner')
  return 'waiting'
end

local function hand_back(req, id, attempt)
  if not is_owned(req.state, ARGV[1], attempt) then
    -- Only its own seat: run twice, this may find the request seated here again under a newer attempt.
    if redis.call('HGET', KEYS[2], id) == attempt then redis.call('HDEL', KEYS[2], id) end
    return 'lost'
  end
  release_row(req.state, id, KEYS[1], KEYS[2], KEYS[6])
  local crashes = redis.call('HINCRBY', req.state, 'crashes', tonumber(ARGV[2]))
  local cause = redis.call('HGET', req.state, 'cancel')
  if cause then
    local status, reason = end_of(cause)
    end_request(req, totals, status, cause,
      finished_event(id, reason, redis.call('STRLEN', req.log) / 4, cause))
    return 'ended'
  end
  if crashes >= tonumber(ARGV[3]) then return give_up(req, id, crashes) end
  return queue_again(req, id, crashes)
end

for i = 6, #ARGV, 2 do
  local k = 9 + (i - 6) / 2 * 3
  out[#out + 1] = ARGV[i]
  out[#out + 1] = hand_back({state = KEYS[k], log = KEYS[k + 1], lps = KEYS[k + 2]}, ARGV[i], ARGV[i + 1])
end
redis.call('PUBLISH', ARGV[5], 'hand_back')
return out
