-- COMMIT: the tokens of one cycle, all rows together, all or nothing.
-- KEYS per row: state, token log, logprobs
-- ARGV 1 worker id  2 rows  3 channels; per row: id, attempt, position, packed tokens, number of logprobs, logprobs...;
--      per channel: channel, message
-- Returns {'ok', id, cause, ...} naming rows somebody wants ended (a cause, or 'deadline'), or
--         {'refused', id, why, length, ...} with why 'lost' (another owner, attempt or end), 'short' (the log holds
--         only `length` tokens: send from there) or 'diverged' (the log holds other tokens); then nothing was written.
local rows, refused, wanted = {}, {}, {}
local at, now = 4, now_ms()

local function refuse(row, why, length)
  for _, v in ipairs({row.id, why, length}) do refused[#refused + 1] = v end
end

local function check(row)
  if not is_owned(row.state, ARGV[1], row.attempt) then return refuse(row, 'lost', 0) end
  local length = redis.call('STRLEN', row.log) / 4
  if row.position > length then return refuse(row, 'short', length) end
  row.old = math.min(length - row.position, #row.tokens / 4)
  local overlap = redis.call('GETRANGE', row.log, row.position * 4, (row.position + row.old) * 4 - 1)
  if row.old > 0 and overlap ~= string.sub(row.tokens, 1, row.old * 4) then return refuse(row, 'diverged', length) end
  local f = redis.call('HMGET', row.state, 'cancel', 'deadline_ms')
  local cause = f[1] or (tonumber(f[2]) <= now and 'deadline')
  if cause then wanted[#wanted + 1] = row.id; wanted[#wanted + 1] = cause end
end

local function append(row)
  if #row.tokens <= row.old * 4 then return end
  local ttl = redis.call('PTTL', row.state)
  redis.call('APPEND', row.log, string.sub(row.tokens, row.old * 4 + 1))
  redis.call('PEXPIRE', row.log, ttl)
  for i = row.old + 1, row.scores do redis.call('RPUSH', row.lps, ARGV[row.at + i - 1]) end
  if row.scores > row.old then redis.call('PEXPIRE', row.lps, ttl) end
end

for i = 1, tonumber(ARGV[2]) do
  local k = i * 3
  local row = {id = ARGV[at], attempt = ARGV[at + 1], position = tonumber(ARGV[at + 2]), tokens = ARGV[at + 3],
    scores = tonumber(ARGV[at + 4]), at = at + 5, state = KEYS[k - 2], log = KEYS[k - 1], lps = KEYS[k]}
  at = at + 5 + row.scores
  check(row)
  rows[i] = row
end
if #refused > 0 then return {'refused', unpack(refused)} end
for _, row in ipairs(rows) do append(row) end
for i = 1, tonumber(ARGV[3]) do redis.call('PUBLISH', ARGV[at + i * 2 - 2], ARGV[at + i * 2 - 1]) end
return {'ok', unpack(wanted)}
