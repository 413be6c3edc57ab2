// Package models has what the authors of model requests share.
package models

// Host is what a policy has: the tools of the server, and the person.
type Host interface {
	// Call calls a tool of the server. failed reports whether the result has isError.
	Call(tool string, arguments map[string]any) (answer map[string]any, failed bool)
	// Ask asks the person which one is meant, and returns the chosen option.
	Ask(question string, options []string) string
}

// Request is what a person wants.
type Request struct {
	ID       string         `json:"id"`
	Language string         `json:"language"`
	Text     string         `json:"text"`
	Kind     string         `json:"kind"`
	Who      string         `json:"who"`
	Do       string         `json:"do"`
	Values   map[string]any `json:"values"`
	Answer   string         `json:"answer"`
	Want     Want           `json:"want"`
}

// Want is how a request is judged.
type Want struct {
	Devices    []string `json:"devices"`
	Tool       []string `json:"tool"`
	Arguments  []any    `json:"arguments"`
	ServerTool []string `json:"server_tool"`
}

// Said is what the policy tells the person at the end.
type Said struct {
	Devices []string // names of the devices it speaks of
	Text    string
}
