package api

// Stats are figures of the fleet over time.
type Stats struct {
	Since        Time          `json:"since"`
	Until        Time          `json:"until" doc:"The end of the last step, which may not be over."`
	Step         int64         `json:"step" doc:"In seconds."`
	Nodes        []string      `json:"nodes" nullable:"false" doc:"Those whose figures are in the answer."`
	NodesMissing []string      `json:"nodes_missing" nullable:"false" doc:"Those that did not answer within a second."`
	Starts       []NodeStart   `json:"starts" nullable:"false" doc:"Starts of nodes in this time. A node has no figures from before its start."`
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
	Label  string     `json:"label,omitempty" example:"reason" doc:"What distinguishes the series with this name."`
	Value  string     `json:"value,omitempty" example:"gone" doc:"Of the label."`
	Unit   string     `json:"unit" enum:"1/s,s,bytes," doc:"1/s: the mean of the step; empty: a number, the mean of the step."`
	Points []*float64 `json:"points" nullable:"false" doc:"One for each step; null: no node has figures of this step, or for a percentile there was nothing to measure."`
}
