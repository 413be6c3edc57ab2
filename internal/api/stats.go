package api

// Stats are figures of the fleet over time.
type Stats struct {
	Since        Time          `json:"since"`
	Until        Time          `json:"until" doc:"The end of the last step, which may not be over."`
	Step         int64         `json:"step" doc:"The step is in seconds."`
	Nodes        []string      `json:"nodes" nullable:"false" doc:"The figures of these nodes are in the answer."`
	NodesMissing []string      `json:"nodes_missing" nullable:"false" doc:"These nodes did not answer within a second."`
	Starts       []NodeStart   `json:"starts" nullable:"false" doc:"Nodes started at these times. A node has no figures from before its start."`
	Series       []StatsSeries `json:"series" nullable:"false"`
}

// NodeStart is when a node started.
type NodeStart struct {
	Node string `json:"node"`
	At   Time   `json:"at"`
}

// StatsSeries is one of the figures.
type StatsSeries struct {
	Name   string     `json:"name" example:"closes"`
	Label  string     `json:"label,omitempty" example:"reason" doc:"It says what distinguishes the series with this name."`
	Value  string     `json:"value,omitempty" example:"gone" doc:"This is the value of the label."`
	Unit   string     `json:"unit" enum:"1/s,s,bytes," doc:"1/s is a rate, the mean of the step. An empty unit is a number, the mean of the step."`
	Points []*float64 `json:"points" nullable:"false" doc:"There is one value for each step. It is null if no node has figures of this step, or if there was nothing to measure for a percentile."`
}
