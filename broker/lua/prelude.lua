-- Shared by every script below it: time, the end of a request, the release of a row, and the two events that
-- scripts write themselves (MessagePack, see docs/wire.md). A request is named by its three keys.

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function pack_str(s)
  if #s < 32 then return string.char(160 + #s) .. s end
  if #s < 256 then return string.char(217, #s) .. s end
  return string.char(218, math.floor(#s / 256), #s % 256) .. s
end

local function pack_uint(n)
  if n < 128 then return string.char(n) end
  local bytes = {206}
  for shift = 3, 0, -1 do bytes[#bytes + 1] = math.floor(n / 256 ^ shift) % 256 end
  return string.char(unpack(bytes))
end

-- [["finished", id, reason, length, -1, cause]]; cause '' becomes nil
local function finished_event(id, reason, length, cause)
  local packed_cause = cause == '' and string.char(192) or pack_str(cause)
  return string.char(145, 150) .. pack_str('finished') .. pack_str(id) .. pack_str(reason)
    .. pack_uint(length) .. string.char(255) .. packed_cause
end

-- [["failed", id, code, message]]
local function failed_event(id, code, message)
  return string.char(145, 148) .. pack_str('failed') .. pack_str(id) .. pack_str(code) .. pack_str(message)
end

-- Takes amounts out of an API key's bucket, where each level refills to its bound within a minute: all or nothing.
-- `wants` maps a level to {amount, bound per minute, 0: none}. Returns what is left by level (-1: no bound), or which
-- level refused and in how many ms it would not (-1: never, the amount is larger than the bound).
local function draw(bucket, now, wants)
  local since = redis.call('HGET', bucket, 'at_ms')
  local left = {}
  for _, name in ipairs({'requests', 'tokens'}) do
    local amount, bound = wants[name][1], wants[name][2]
    left[name] = -1
    if bound > 0 then
      local level = tonumber(redis.call('HGET', bucket, name) or bound)
      if level < 0 then level = bound end -- the bound is new
      if since then level = math.min(bound, level + bound * (now - tonumber(since)) / 60000) end
      if amount > bound then return {refused = name, wait_ms = -1} end
      if amount > level then return {refused = name, wait_ms = math.ceil((amount - level) * 60000 / bound)} end
      left[name] = level - amount
    end
  end
  redis.call('HSET', bucket, 'requests', left.requests, 'tokens', left.tokens, 'at_ms', now)
  redis.call('PEXPIRE', bucket, 120000) -- by then it is full again
  return left
end

-- Gives back what a request reserved and did not use.
local function refund(req, bucket, cost, prompt_tokens)
  if bucket == '' or redis.call('EXISTS', bucket) == 0 then return end
  local unused = tonumber(cost) - tonumber(prompt_tokens) - redis.call('STRLEN', req.log) / 4
  if tonumber(redis.call('HGET', bucket, 'tokens')) >= 0 then redis.call('HINCRBYFLOAT', bucket, 'tokens', unused) end
end

-- Writes the terminal state once, starts retention, lowers the load, tells the listener. `totals` are the keys of load,
-- ended and live requests.
local function end_request(req, totals, status, cause, event)
  local f = redis.call('HMGET', req.state, 'priority', 'cost', 'reply', 'retain_ms', 'bucket', 'prompt_tokens',
    'listening', 'id')
  refund(req, f[5] or '', f[2], f[6])
  if f[7] then redis.call('SREM', f[7], f[8]) end
  redis.call('HSET', req.state, 'status', status, 'end', event, 'ended_ms', now_ms())
  redis.call('HDEL', req.state, 'body', 'ticket', 'owner', 'entry', 'stream')
  for _, key in pairs(req) do redis.call('PEXPIRE', key, f[4]) end
  redis.call('HINCRBY', totals[1], 'requests:' .. f[1], -1)
  redis.call('HINCRBY', totals[1], 'tokens:' .. f[1], -tonumber(f[2]))
  redis.call('HINCRBY', totals[2], f[1] .. ':' .. status .. ':' .. cause, 1)
  redis.call('ZREM', totals[3], f[8])
  if f[3] ~= '' then redis.call('PUBLISH', f[3], event) end
end

-- Gives a row's place and cache slots back to the worker, if the worker still has a record.
local function release_row(state_key, id, daemon_key, rows_key, key_rows_key)
  if redis.call('HDEL', rows_key, id) == 0 then return end
  local f = redis.call('HMGET', state_key, 'cost', 'key_id')
  if redis.call('HINCRBY', key_rows_key, f[2], -1) <= 0 then redis.call('HDEL', key_rows_key, f[2]) end
  if redis.call('EXISTS', daemon_key) == 0 then return end
  redis.call('HINCRBY', daemon_key, 'free', 1)
  if redis.call('HEXISTS', daemon_key, 'free_tokens') == 1 then
    redis.call('HINCRBY', daemon_key, 'free_tokens', tonumber(f[1]))
  end
end

-- Whether this worker still owns the request under this attempt.
local function is_owned(state_key, worker, attempt)
  local f = redis.call('HMGET', state_key, 'status', 'owner', 'attempt')
  return f[1] == 'running' and f[2] == worker and f[3] == attempt
end

-- The status and finish reason that a cause of cancellation leads to.
local function end_of(cause)
  if cause == 'deadline' then return 'expired', 'deadline' end
  if cause == 'stop' then return 'finished', 'stop' end
  return 'cancelled', 'cancelled'
end

-- More of the oldest leave a list than come, where their records have expired; so it does not grow for ever.
-- `record_key` is the key of the record of `id`.
local function drop_oldest_expired(list_key, record_key, id)
  local prefix = string.sub(record_key, 1, #record_key - #id)
  for _, oldest in ipairs(redis.call('ZRANGE', list_key, 0, 3)) do
    if redis.call('EXISTS', prefix .. oldest) == 0 then redis.call('ZREM', list_key, oldest) end
  end
end
