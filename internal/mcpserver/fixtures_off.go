//go:build !conformance

package mcpserver

import (
	"context"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// A server with the fixtures of the conformance suite is built for that alone,
// with the tag conformance.

func (s *Server) fixtureCapabilities(*mcp.ServerCapabilities) {}

func (s *Server) addFixtures(*mcp.Server) {}

func (s *Server) fixtureTools(context.Context, mcp.MethodHandler, string, mcp.Request) ([]*mcp.Tool, error) {
	return nil, nil
}

func (s *Server) isFixture(string) bool { return false }

func (s *Server) listsFixtures() bool { return false }
