package fleettest

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"fleetd/internal/store/database"
)

// A newer node has migrated the database of a fleet: the older ones go on with it, after an outage and a start, too, until a
// migration raises the lowest schema version that a program must support.
func TestNewerSchemaUnderOlderNodes(t *testing.T) {
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2})
	newer := database.SchemaVersion() + 1
	c.DB.Exec(t, fmt.Sprintf(`INSERT INTO goose_db_version (version_id, is_applied) VALUES (%d, TRUE)`, newer))
	await := func(what string, status int, text string) {
		t.Helper()
		for _, n := range c.Nodes {
			n.Await(t, what, 20*time.Second, func() bool {
				got, body := n.ask(t, "", http.MethodGet, "/readyz", "")
				return got == status && strings.Contains(body, text)
			})
		}
	}
	c.BreakSQL(Cut)
	await("the database is away", http.StatusServiceUnavailable, "")
	c.BreakSQL(None)
	await("the nodes use the newer schema", http.StatusOK, "")
	c.Nodes[0].Stop(t)
	c.Nodes[0].Run(t)
	await("a node starts with the newer schema", http.StatusOK, "")
	c.DB.Exec(t, fmt.Sprintf(`UPDATE fleet SET value = '%d' WHERE key = 'lowest_schema'`, newer))
	await("the nodes are too old", http.StatusServiceUnavailable, "")
	for _, n := range c.Nodes {
		n.Await(t, "the log says what to do", 10*time.Second, func() bool { return strings.Contains(n.Log.String(), "start a newer fleetd") })
	}
	c.DB.Exec(t, fmt.Sprintf(`UPDATE fleet SET value = '%d' WHERE key = 'lowest_schema'`, newer-1)) // so that the nodes stop as usual
	await("the nodes may use it again", http.StatusOK, "")
}
