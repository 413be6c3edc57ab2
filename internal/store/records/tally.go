package records

import (
	"database/sql/driver"
	"encoding/json"
	"fmt"

	"modernc.org/sqlite"
)

// tallyFunction is an aggregate function of SQLite that returns the number of each text as JSON: GROUP
// BY would sort all rows, which takes longer than reading them.
const tallyFunction = "fleetd_tally"

func init() {
	sqlite.MustRegisterFunction(tallyFunction, &sqlite.FunctionImpl{NArgs: 1, MakeAggregate: func(sqlite.FunctionContext) (sqlite.AggregateFunction, error) {
		return tallied{}, nil
	}})
}

type tallied map[string]int64

// Step implements sqlite.AggregateFunction.
func (t tallied) Step(_ *sqlite.FunctionContext, args []driver.Value) error {
	text, ok := args[0].(string)
	if !ok {
		return fmt.Errorf("%s counts text, not %T", tallyFunction, args[0])
	}
	t[text]++
	return nil
}

// WindowInverse implements sqlite.AggregateFunction.
func (t tallied) WindowInverse(_ *sqlite.FunctionContext, args []driver.Value) error {
	if text, ok := args[0].(string); ok {
		t[text]--
	}
	return nil
}

// WindowValue implements sqlite.AggregateFunction; it is also the result.
func (t tallied) WindowValue(*sqlite.FunctionContext) (driver.Value, error) {
	text, err := json.Marshal(t)
	return string(text), err
}

// Final implements sqlite.AggregateFunction.
func (t tallied) Final(*sqlite.FunctionContext) {}
