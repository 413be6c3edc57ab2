package fleettest

import (
	"errors"
	"slices"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// A code made on one node works once on another; the key that it gives is refused on all nodes within a second
// after its parent was revoked, and does what it does in the parent's name.
func TestConsoleAcrossNodes(t *testing.T) {
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 3})
	programs.Simulate(t, c.OTA, "--devices", "1")
	c.AwaitReady(t, 1, time.Minute)
	c.Nodes[0].AwaitStored(t)
	parent, err := c.Nodes[0].CreateKey(t.Context(), api.NewKey{Name: "desk", Scopes: []string{"devices:read", "tools:call", "jobs"}})
	if err != nil {
		t.Fatal(err)
	}
	with := func(n *Node, token string) *apiclient.Client {
		t.Helper()
		client, err := apiclient.New(n.Info.API, token)
		if err != nil {
			t.Fatal(err)
		}
		return client
	}
	code, err := apiclient.Send[api.ConsoleCode](t.Context(), with(c.Nodes[0], parent.Token), apiclient.Request{Method: "POST", Path: []string{"console", "codes"}, Body: api.NewConsoleCode{}})
	if err != nil {
		t.Fatal(err)
	}
	key, err := apiclient.Send[api.CreatedKey](t.Context(), with(c.Nodes[1], ""), apiclient.Request{Method: "POST", Path: []string{"console", "keys"}, Body: api.ConsoleLogin{Code: code.Code}})
	if err != nil || key.Parent != parent.ID || !slices.Equal(key.Scopes, parent.Scopes) {
		t.Fatalf("%+v, %v", key, err)
	}
	// security: K19
	if _, err := apiclient.Send[api.CreatedKey](t.Context(), with(c.Nodes[2], ""), apiclient.Request{Method: "POST", Path: []string{"console", "keys"}, Body: api.ConsoleLogin{Code: code.Code}}); err == nil {
		t.Error("the code worked twice")
	}
	for _, n := range c.Nodes {
		n.Await(t, "the node has the key", time.Second, func() bool {
			self, err := apiclient.Get[api.Self](t.Context(), with(n, key.Token), nil, "self")
			return err == nil && self.Key == parent.ID && self.Through == key.ID
		})
	}
	job, err := apiclient.Send[api.Job](t.Context(), with(c.Nodes[2], key.Token), apiclient.Request{Method: "POST", Path: []string{"jobs"}, Body: api.NewJob{JobSpec: api.JobSpec{Select: "device=*", Action: api.JobAction{Call: &api.JobCall{Tool: status}}}}})
	if err != nil {
		t.Fatal(err)
	}
	if j := c.Nodes[1].awaitJob(t, job.ID, "done"); j.CreatedBy != "desk" || j.Counts.OK != 1 {
		t.Errorf("%+v", j)
	}
	c.Nodes[0].Await(t, "the audit names both", 20*time.Second, func() bool {
		entries, err := apiclient.Collect(apiclient.List[api.AuditEntry](t.Context(), c.Nodes[0].Client, apiclient.Query{"key": parent.ID}, "audit"))
		return err == nil && slices.ContainsFunc(entries, func(e api.AuditEntry) bool {
			return e.Action == "create job" && e.Name == "desk" && e.Through == key.ID
		})
	})
	if _, err := c.Nodes[0].RevokeKey(t.Context(), parent.ID); err != nil {
		t.Fatal(err)
	}
	for _, n := range c.Nodes {
		// security: K19
		n.Await(t, "the console key has ended with its parent", time.Second, func() bool {
			_, err := apiclient.Get[api.Self](t.Context(), with(n, key.Token), nil, "self")
			var refused *apiclient.Problem
			return errors.As(err, &refused) && refused.Code == "unauthorized"
		})
	}
}
