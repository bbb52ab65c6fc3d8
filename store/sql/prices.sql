-- Price versions: immutable, each in effect from its moment until the model's next.

-- name: add_price
INSERT INTO prices (id, model, currency, input_micro, cached_input_micro, output_micro,
                    request_micro, effective_ms)
VALUES (:id, :model, :currency, :input_micro, :cached_input_micro, :output_micro,
        :request_micro, :effective_ms)
ON CONFLICT (id) DO NOTHING

-- name: price_by_id
SELECT id, currency, input_micro, cached_input_micro, output_micro, request_micro,
       model, effective_ms
FROM prices WHERE id = :id

-- name: current_price
SELECT id, currency, input_micro, cached_input_micro, output_micro, request_micro,
       model, effective_ms
FROM prices WHERE model = :model AND effective_ms <= :at_ms
ORDER BY effective_ms DESC LIMIT 1

-- name: price_list
SELECT id, currency, input_micro, cached_input_micro, output_micro, request_micro,
       model, effective_ms
FROM prices ORDER BY model, effective_ms
